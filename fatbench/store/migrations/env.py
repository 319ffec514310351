"""Alembic runs this: migrations on the connection that `fatbench.store.stages.upgrade` opened, in its transaction."""

from __future__ import annotations

from alembic import context

from fatbench.store.schema import METADATA, VERSION

connection = context.config.attributes.get("connection")
if connection is None:
    raise SystemExit("use 'fatbench db upgrade'; for a new revision see fatbench/store/migrations/README.md")
context.configure(
    connection=connection,
    target_metadata=METADATA,
    version_table=VERSION.name,
    render_as_batch=True,  # SQLite cannot alter most of a table: it is copied
)
with context.begin_transaction():
    context.run_migrations()
