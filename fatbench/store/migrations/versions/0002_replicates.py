"""Replicates of a cell, the view `measurements` that names them, and the view `outcomes`: one row an image."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

NAME = sa.String(190).with_variant(sa.Text(), "sqlite").with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the table; make both views."""
    op.create_table(
        "replicates",
        sa.Column("id", NAME, sa.ForeignKey("cells.id"), primary_key=True),
        sa.Column("cell", NAME, sa.ForeignKey("cells.id"), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
    )
    op.create_index("replicates_cell", "replicates", ["cell"])
    op.execute("DROP VIEW measurements")
    op.execute(
        """\
CREATE VIEW measurements AS
SELECT n.cell, r.suite, n.stage, n.round, n.metric, n.value, n.n, c.seed, r."commit", r.device, r."precision",
  n.created, n.client, r.preset, r.dirty, n.run, s.settings, p.cell AS replicate_of,
  coalesce(p.number, 0) AS replicate
FROM numbers n JOIN runs r ON r.id = n.run JOIN cells c ON c.id = n.cell
  JOIN stages s ON s.cell = n.cell AND s.stage = n.stage LEFT JOIN replicates p ON p.id = n.cell"""
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            """\
CREATE VIEW outcomes AS
SELECT o.cell, o.stage, o.start + k AS position, get_bit(o.bits, k / 8 * 8 + 7 - k % 8) AS correct
FROM outcome_chunks o CROSS JOIN LATERAL generate_series(0, o.n - 1) AS k"""
        )
    else:
        op.execute(
            """\
CREATE VIEW outcomes AS
WITH RECURSIVE places(k) AS
  (SELECT 0 UNION ALL SELECT k + 1 FROM places WHERE k + 1 < (SELECT max(n) FROM outcome_chunks))
SELECT o.cell, o.stage, o.start + k AS position,
  (instr('0123456789ABCDEF', substr(hex(o.bits), k / 4 + 1, 1)) - 1) >> (3 - k % 4) & 1 AS correct
FROM outcome_chunks o JOIN places ON k < o.n"""
        )
