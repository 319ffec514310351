"""What the newest run found where a data set lies, so that numbers of other images are known without reading them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

NAME = sa.String(190).with_variant(sa.Text(), "sqlite").with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the table; of data sets that were read before nothing is known."""
    op.create_table(
        "seen_data",
        sa.Column("data", NAME, primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("created", sa.String(24), nullable=False),
    )
