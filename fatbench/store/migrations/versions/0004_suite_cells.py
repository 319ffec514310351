"""Cells that a suite shares with the one that ran them, and the view `suite_cells`: which suite has which cell."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

NAME = sa.String(190).with_variant(sa.Text(), "sqlite").with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the table; make the view."""
    op.create_table(
        "shared_cells",
        sa.Column("suite", sa.Text, nullable=False),
        sa.Column("preset", sa.Text, nullable=False),
        sa.Column("cell", NAME, sa.ForeignKey("cells.id"), nullable=False),
        sa.PrimaryKeyConstraint("suite", "preset", "cell", name="shared_cells_key"),
    )
    op.create_index("shared_cells_cell", "shared_cells", ["cell"])
    op.execute(
        """\
CREATE VIEW suite_cells AS
SELECT suite, preset, cell FROM runs UNION SELECT suite, preset, cell FROM shared_cells"""
    )
