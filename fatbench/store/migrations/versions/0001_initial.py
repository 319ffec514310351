"""The first schema: cells, runs, stages, numbers, outcomes and the public view `measurements`."""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

NAME = sa.String(190).with_variant(sa.Text(), "sqlite").with_variant(sa.Text(collation="C"), "postgresql")
STATUS = "status IN ('todo', 'running', 'done', 'failed', 'interrupted')"


def upgrade() -> None:
    """Make every table of the schema."""
    identity = op.create_table("identity", sa.Column("id", sa.String(32), primary_key=True))
    op.bulk_insert(identity, [{"id": uuid.uuid4().hex}])
    op.create_table(
        "cells",
        sa.Column("id", NAME, primary_key=True),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("seed", sa.BigInteger),
        sa.Column("created", sa.String(24), nullable=False),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("uid", sa.String(32), nullable=False, unique=True),
        sa.Column("cell", NAME, sa.ForeignKey("cells.id"), nullable=False),
        sa.Column("stage", NAME, nullable=False),
        sa.Column("suite", sa.Text, nullable=False),
        sa.Column("preset", sa.Text),
        sa.Column("status", sa.String(12), sa.CheckConstraint(STATUS, name="runs_status"), nullable=False),
        sa.Column("started", sa.String(24), nullable=False),
        sa.Column("ended", sa.String(24)),
        sa.Column("host", sa.Text),
        sa.Column("pid", sa.Integer),
        sa.Column("process", sa.Text),
        sa.Column("device", sa.Text),
        sa.Column("precision", sa.Text),
        sa.Column("commit", sa.Text),
        sa.Column("dirty", sa.Boolean),
        sa.Column("versions", sa.Text),
        sa.Column("log", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("extra", sa.Text, nullable=False),
    )
    op.create_index("runs_cell", "runs", ["cell"])
    op.create_table(
        "stages",
        sa.Column("cell", NAME, sa.ForeignKey("cells.id"), nullable=False),
        sa.Column("stage", NAME, nullable=False),
        sa.Column("status", sa.String(12), sa.CheckConstraint(STATUS, name="stages_status"), nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
        sa.Column("total", sa.Integer, nullable=False),
        sa.Column("checkpoint", sa.Text),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("settings", sa.Text),
        sa.Column("run", sa.Integer, sa.ForeignKey("runs.id")),
        sa.Column("error", sa.Text),
        sa.Column("heartbeat", sa.String(24)),
        sa.PrimaryKeyConstraint("cell", "stage", name="stages_key"),
    )
    op.create_index("stages_run", "stages", ["run"])
    op.create_table(
        "numbers",
        sa.Column("cell", NAME, nullable=False),
        sa.Column("stage", NAME, nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
        sa.Column("client", sa.Integer, nullable=False),
        sa.Column("metric", NAME, nullable=False),
        sa.Column("value", sa.Float(53), nullable=False),
        sa.Column("n", sa.Integer, nullable=False),
        sa.Column("run", sa.Integer, sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("created", sa.String(24), nullable=False),
        sa.PrimaryKeyConstraint("cell", "stage", "round", "client", "metric", name="numbers_key"),
        sa.ForeignKeyConstraint(["cell", "stage"], ["stages.cell", "stages.stage"], name="numbers_stage"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "outcome_chunks",
        sa.Column("cell", NAME, nullable=False),
        sa.Column("stage", NAME, nullable=False),
        sa.Column("start", sa.Integer, nullable=False),
        sa.Column("n", sa.Integer, nullable=False),
        sa.Column("bits", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("cell", "stage", "start", name="outcomes_key"),
        sa.ForeignKeyConstraint(["cell", "stage"], ["stages.cell", "stages.stage"], name="outcomes_stage"),
    )
    op.execute(
        """\
CREATE VIEW measurements AS
SELECT n.cell, r.suite, n.stage, n.round, n.metric, n.value, n.n, c.seed, r."commit", r.device, r."precision",
  n.created, n.client, r.preset, r.dirty, n.run, s.settings
FROM numbers n JOIN runs r ON r.id = n.run JOIN cells c ON c.id = n.cell
  JOIN stages s ON s.cell = n.cell AND s.stage = n.stage"""
    )
