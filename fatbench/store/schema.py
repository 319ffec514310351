"""The tables of the database, and its views."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    column,
    select,
    table,
)

APPLICATION_ID = 0x66617462  # "fatb", in the header of fatbench's SQLite files
SCHEMA = "0009"  # raised with every change of the tables below; databases of another are refused

TAKEN_OVER = ("0005", "0006", "0007", "0008")  # earlier ones that `fatbench.store.old_databases` reads

METADATA = MetaData()
# byte order in every database, so that an export does not depend on the server's locale
NAME = String(190).with_variant(Text(), "sqlite").with_variant(Text(collation="C"), "postgresql")
TIME = String(24)
STATUS = "status IN ('todo', 'running', 'done', 'failed', 'interrupted')"

# one row, which also marks the folder of the database's checkpoints
IDENTITY = Table("identity", METADATA, Column("id", String(32), primary_key=True))
CELLS = Table(
    "cells",
    METADATA,
    Column("id", NAME, primary_key=True),
    Column("spec", Text, nullable=False),  # canonical JSON, every default filled in
    Column("seed", BigInteger),
    Column("created", TIME, nullable=False),
)
REPLICATES = Table(  # further runs of a cell, see fatbench.store.replicates
    "replicates",
    METADATA,
    Column("id", NAME, ForeignKey("cells.id"), primary_key=True),
    Column("cell", NAME, ForeignKey("cells.id"), nullable=False),  # the cell that it repeats
    Column("number", Integer, nullable=False),  # from 1
    Index("replicates_cell", "cell"),
)
RUNS = Table(
    "runs",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("uid", String(32), nullable=False, unique=True),  # the same on every machine
    Column("cell", NAME, ForeignKey("cells.id"), nullable=False),
    Column("stage", NAME, nullable=False),
    Column("suite", Text, nullable=False),
    Column("preset", Text),
    Column("status", String(12), CheckConstraint(STATUS, name="runs_status"), nullable=False),
    Column("started", TIME, nullable=False),
    Column("ended", TIME),
    Column("host", Text),
    Column("pid", Integer),
    Column("process", Text),  # machine, boot and start time, which make the pid unique
    Column("device", Text),
    Column("precision", Text),
    Column("commit", Text),
    Column("dirty", Boolean),
    Column("versions", Text),  # JSON
    Column("log", Text),
    Column("error", Text),
    Column("extra", Text, nullable=False),  # JSON: the rest of the provenance
    Index("runs_cell", "cell"),
)
POINTS = Table(  # points of suites' grids, see fatbench.store.grid_points
    "points",
    METADATA,
    Column("suite", NAME, nullable=False),
    Column("preset", NAME, nullable=False),
    Column("cell", NAME, ForeignKey("cells.id"), nullable=False),
    Column("labels", NAME, nullable=False),  # JSON {axis: label}
    Column("method", NAME, nullable=False),
    Column("data", NAME, nullable=False),
    Column("split", NAME, nullable=False),
    Column("model", NAME, nullable=False),
    Column("kind", String(12), nullable=False),  # key of `asked`; empty without evaluations
    Column("shown", NAME, ForeignKey("cells.id"), nullable=False),  # the cell or replicate that tables show
    Column("current", Boolean, nullable=False),  # False: the suite's file gives another cell, or none, there today
    # every column but `shown` and `current`, so that a damaged value contradicts the key's index
    PrimaryKeyConstraint(
        "suite", "preset", "cell", "labels", "method", "data", "split", "model", "kind", name="points_key"
    ),
    Index("points_cell", "cell"),
    Index("points_shown", "shown"),
)
ASKED = Table(  # the evaluations that a kind of point asks for
    "asked",
    METADATA,
    Column("kind", String(12), nullable=False),
    Column("evaluation", NAME, nullable=False),  # "pgd20-0a1b2c3d"
    Column("attack", NAME, nullable=False),  # "pgd20"
    PrimaryKeyConstraint("kind", "evaluation", "attack", name="asked_key"),
)
SEEN_DATA = Table(  # the data that the newest run has read for a cell's setting
    "seen_data",
    METADATA,
    Column("data", NAME, primary_key=True),  # canonical JSON of the cell's setting
    Column("fingerprint", String(64), nullable=False),
    Column("created", TIME, nullable=False),
)
STAGES = Table(
    "stages",
    METADATA,
    Column("cell", NAME, ForeignKey("cells.id"), nullable=False),
    Column("stage", NAME, nullable=False),
    Column("status", String(12), CheckConstraint(STATUS, name="stages_status"), nullable=False),
    Column("round", Integer, nullable=False),
    Column("total", Integer, nullable=False),
    Column("checkpoint", Text),
    Column("record", Text, nullable=False),  # JSON
    Column("settings", Text),  # JSON: the attack of an evaluation, with all defaults, and its implementation
    Column("run", Integer, ForeignKey("runs.id")),
    Column("error", Text),
    Column("heartbeat", TIME),
    Column("digest", String(64)),  # of a finished stage, see fatbench.store.document
    PrimaryKeyConstraint("cell", "stage", name="stages_key"),
    Index("stages_run", "run"),
)
ROUND_METRICS = Table(  # what all clients' numbers of one metric and round share
    "round_metrics",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("cell", NAME, nullable=False),
    Column("stage", NAME, nullable=False),
    Column("round", Integer, nullable=False),
    Column("metric", NAME, nullable=False),
    Column("run", Integer, ForeignKey("runs.id"), nullable=False),
    Column("created", TIME, nullable=False),
    ForeignKeyConstraint(["cell", "stage"], ["stages.cell", "stages.stage"], name="round_metrics_stage"),
    Index("round_metrics_cell", "cell", "stage", "round", "metric"),
)
VALUES = Table(
    "numbers",
    METADATA,
    Column("round_metric", Integer, ForeignKey("round_metrics.id"), nullable=False),
    Column("client", Integer, nullable=False),  # -1: not about one client (a NULL would escape the key)
    Column("value", Float(53), nullable=False),
    Column("n", Integer, nullable=False),
    PrimaryKeyConstraint("round_metric", "client", name="numbers_key"),
    sqlite_with_rowid=False,  # the key is the table: half the size
)
NUMBERS = (  # for reading: one row for each number
    select(*(ROUND_METRICS.c[name] for name in ("cell", "stage", "round", "metric", "run", "created")))
    .add_columns(VALUES.c.client, VALUES.c.value, VALUES.c.n)
    .join(VALUES, VALUES.c.round_metric == ROUND_METRICS.c.id)
    .subquery("all_numbers")
)
OUTCOME_CHUNKS = Table(
    "outcome_chunks",
    METADATA,
    Column("cell", NAME, nullable=False),
    Column("stage", NAME, nullable=False),
    Column("start", Integer, nullable=False),  # the first example of the chunk
    Column("n", Integer, nullable=False),
    Column("bits", LargeBinary, nullable=False),  # eight examples a byte, the first in the highest bit
    PrimaryKeyConstraint("cell", "stage", "start", name="outcomes_key"),
    ForeignKeyConstraint(["cell", "stage"], ["stages.cell", "stages.stage"], name="outcomes_stage"),
)
DOUBTS = Table(  # reasons to doubt an evaluation, see fatbench.report.numbers.doubts
    "doubts",
    METADATA,
    Column("cell", NAME, nullable=False),
    Column("stage", NAME, nullable=False),
    Column("code", NAME, nullable=False),
    Column("against", NAME, nullable=False),  # the other attack's label, or empty
    Column("value", Float(53)),  # a round, a count, a fraction
    PrimaryKeyConstraint("cell", "stage", "code", "against", name="doubts_key"),
    ForeignKeyConstraint(["cell", "stage"], ["stages.cell", "stages.stage"], name="doubts_stage"),
)
WORK = MetaData()  # what runs work by: it is made where it is missing, and is not part of the schema's version
POOLS = Table(
    "pools",
    WORK,
    Column("id", String(32), primary_key=True),
    Column("work", LargeBinary, nullable=False),
    Column("stops", Integer, nullable=False),  # 1: after the current round
    Column("host", Text),  # of the process without which the pool is nothing; None: it outlives any
    Column("pid", Integer),
    Column("process", Text),
    Column("user", Text, nullable=False),
)
POOL_CELLS = Table(
    "pool_cells",
    WORK,
    Column("pool", String(32), ForeignKey("pools.id", ondelete="CASCADE"), primary_key=True),
    Column("cell", NAME, primary_key=True),
    Column("place", Integer, nullable=False),  # in the order of the run
    Column("status", String(12), nullable=False),
    Column("worker", NAME, nullable=False),
    Column("tries", Integer, nullable=False),
    Index("pool_cells_status", "pool", "status", "place"),
)
POOL_WORKERS = Table(
    "pool_workers",
    WORK,
    Column("pool", String(32), ForeignKey("pools.id", ondelete="CASCADE"), primary_key=True),
    Column("worker", NAME, primary_key=True),
    Column("host", Text, nullable=False),  # empty before it starts
    Column("pid", Integer, nullable=False),
    Column("leaves", Integer, nullable=False),
    Column("tries", Integer, nullable=False),  # how often a job was submitted before
    Column("no_progress", Integer, nullable=False),  # starts of a job in a row without a finished round
    Column("said", Text, nullable=False),  # how a job of SLURM has ended, the node of a Ray task
)
POOL_REPORTS = Table(
    "pool_reports",
    WORK,
    Column("id", Integer, primary_key=True),
    Column("pool", String(32), ForeignKey("pools.id", ondelete="CASCADE"), nullable=False),
    Column("worker", NAME, nullable=False),
    Column("events", Text, nullable=False),  # JSON
    Index("pool_reports_pool", "pool", "id"),
    sqlite_autoincrement=True,
)
VERSION = Table(  # with a prefix, because a PostgreSQL database may have other users
    "fatbench_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="fatbench_version_pkc"),
)
VIEW_SQL = """\
CREATE VIEW measurements AS
SELECT m.cell, r.suite, m.stage, m.round, m.metric, n.value, n.n, c.seed, r."commit", r.device, r."precision",
  m.created, n.client, r.preset, r.dirty, m.run, s.settings, p.cell AS replicate_of,
  coalesce(p.number, 0) AS replicate
FROM round_metrics m JOIN numbers n ON n.round_metric = m.id JOIN runs r ON r.id = m.run
  JOIN cells c ON c.id = m.cell JOIN stages s ON s.cell = m.cell AND s.stage = m.stage
  LEFT JOIN replicates p ON p.id = m.cell"""
VIEW = table(
    "measurements",
    *map(column, ("cell", "suite", "stage", "round", "metric", "value", "n", "seed", "commit", "device", "precision")),
    *map(column, ("created", "client", "preset")),
    column("dirty", Boolean),
    column("run"),
    column("settings"),
    column("replicate_of"),
    column("replicate"),
)
SUITE_CELLS_SQL = """\
CREATE VIEW suite_cells AS
SELECT suite, preset, cell FROM runs UNION SELECT suite, preset, cell FROM points"""
SUITE_CELLS = table("suite_cells", *map(column, ("suite", "cell", "preset")))  # every suite of a cell, once
# One row for each outcome: `position` counts the stage's test images from 0, model after model if it has several;
# `correct` is 1 if the image was classified correctly.
OUTCOMES_VIEW = "outcomes"
OUTCOMES_VIEW_SQL = {
    "postgresql": """\
CREATE VIEW outcomes AS
SELECT o.cell, o.stage, o.start + k AS position, get_bit(o.bits, k / 8 * 8 + 7 - k % 8) AS correct
FROM outcome_chunks o CROSS JOIN LATERAL generate_series(0, o.n - 1) AS k""",
    "sqlite": """\
CREATE VIEW outcomes AS
WITH RECURSIVE places(k) AS
  (SELECT 0 UNION ALL SELECT k + 1 FROM places WHERE k + 1 < (SELECT max(n) FROM outcome_chunks))
SELECT o.cell, o.stage, o.start + k AS position,
  (instr('0123456789ABCDEF', substr(hex(o.bits), k / 4 + 1, 1)) - 1) >> (3 - k % 4) & 1 AS correct
FROM outcome_chunks o JOIN places ON k < o.n""",
}
# One row for each accuracy that a suite asks for, of the run that its tables show, and for each checkpoint.
RESULTS_VIEW = "results"
_RESULTS = """\
CREATE VIEW results AS
SELECT p.suite, p.preset, p.method, p.data, p.split, p.model, a.attack, c.seed, n.value, n.n,
  coalesce((SELECT {joined}(code, ', ') FROM
    (SELECT DISTINCT d.code FROM doubts d WHERE d.cell = s.cell AND d.stage = s.stage ORDER BY d.code) AS codes), '')
    AS doubts,
  m.round, coalesce(m.round = {rounds}, m.round = 0) AS is_last,
  coalesce(m.round = {best_test}, {false}) AS is_best_test, coalesce(m.round = {best_val}, {false}) AS is_best_val,
  p.labels, p.cell, p.shown AS run, r.device, r."precision", r."commit", m.stage, p.current
FROM points p JOIN asked a ON a.kind = p.kind
  JOIN stages s ON s.cell = p.shown AND substr(s.stage, 1, length(a.evaluation)) = a.evaluation
    AND substr(s.stage, length(a.evaluation) + 1, 1) IN ('@', '.')
  JOIN round_metrics m ON m.cell = s.cell AND m.stage = s.stage AND m.metric = a.attack
  JOIN numbers n ON n.round_metric = m.id AND n.client = -1
  JOIN cells c ON c.id = p.shown JOIN runs r ON r.id = m.run
  LEFT JOIN stages t ON t.cell = p.shown AND t.stage = 'train'"""
RESULTS_VIEW_SQL = {
    "postgresql": _RESULTS.format(
        joined="string_agg", false="false", rounds="(c.spec::json #>> '{algorithm,rounds}')::integer",
        best_test="(t.record::json #>> '{best-test,round}')::integer",
        best_val="(t.record::json #>> '{best-val,round}')::integer",
    ),
    "sqlite": _RESULTS.format(
        joined="group_concat", false="0", rounds="json_extract(c.spec, '$.algorithm.rounds')",
        best_test="json_extract(t.record, '$.best-test.round')", best_val="json_extract(t.record, '$.best-val.round')",
    ),
}  # fmt: skip
VIEWS = {
    dialect: (VIEW_SQL, SUITE_CELLS_SQL, OUTCOMES_VIEW_SQL[dialect], RESULTS_VIEW_SQL[dialect])
    for dialect in ("postgresql", "sqlite")
}  # statements that create the views
