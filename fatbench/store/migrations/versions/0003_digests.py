"""The digest of a finished stage; `fatbench db upgrade` computes those of the stages that are there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("stages", sa.Column("digest", sa.String(64)))
