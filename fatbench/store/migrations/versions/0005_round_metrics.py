"""What the numbers of all clients share in one metric of one round stands once, not beside each of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

NAME = sa.String(190).with_variant(sa.Text(), "sqlite").with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Split the table of numbers in two; make the view `measurements` anew."""
    op.execute("DROP VIEW measurements")
    op.execute("CREATE TABLE numbers_before AS SELECT * FROM numbers")
    op.drop_table("numbers")
    op.create_table(
        "round_metrics",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("cell", NAME, nullable=False),
        sa.Column("stage", NAME, nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
        sa.Column("metric", NAME, nullable=False),
        sa.Column("run", sa.Integer, sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("created", sa.String(24), nullable=False),
        sa.ForeignKeyConstraint(["cell", "stage"], ["stages.cell", "stages.stage"], name="round_metrics_stage"),
    )
    op.create_index("round_metrics_cell", "round_metrics", ["cell", "stage", "round", "metric"])
    op.create_table(
        "numbers",
        sa.Column("round_metric", sa.Integer, sa.ForeignKey("round_metrics.id"), nullable=False),
        sa.Column("client", sa.Integer, nullable=False),
        sa.Column("value", sa.Float(53), nullable=False),
        sa.Column("n", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("round_metric", "client", name="numbers_key"),
        sqlite_with_rowid=False,
    )
    op.execute(
        """\
INSERT INTO round_metrics (cell, stage, round, metric, run, created)
SELECT DISTINCT cell, stage, round, metric, run, created FROM numbers_before ORDER BY cell, stage, round, metric"""
    )
    op.execute(
        """\
INSERT INTO numbers (round_metric, client, value, n)
SELECT m.id, b.client, b.value, b.n
FROM numbers_before b JOIN round_metrics m ON m.cell = b.cell AND m.stage = b.stage AND m.round = b.round
  AND m.metric = b.metric AND m.run = b.run AND m.created = b.created ORDER BY m.id, b.client"""
    )
    op.drop_table("numbers_before")
    op.execute(
        """\
CREATE VIEW measurements AS
SELECT m.cell, r.suite, m.stage, m.round, m.metric, n.value, n.n, c.seed, r."commit", r.device, r."precision",
  m.created, n.client, r.preset, r.dirty, m.run, s.settings, p.cell AS replicate_of,
  coalesce(p.number, 0) AS replicate
FROM round_metrics m JOIN numbers n ON n.round_metric = m.id JOIN runs r ON r.id = m.run
  JOIN cells c ON c.id = m.cell JOIN stages s ON s.cell = m.cell AND s.stage = m.stage
  LEFT JOIN replicates p ON p.id = m.cell"""
    )
