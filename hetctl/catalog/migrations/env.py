"""Run by Alembic for every migration, inside the transaction that `upgrade` was given."""

from __future__ import annotations

from alembic import context

from hetctl.catalog.schema import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
context.run_migrations()
