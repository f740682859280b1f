"""Alembic environment, run for every migration inside the transaction that `upgrade` receives."""

from __future__ import annotations

from alembic import context

from hetctl.catalog.schema import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
context.run_migrations()
