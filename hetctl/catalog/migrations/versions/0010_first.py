"""The schema that catalogs begin with: `hetctl.catalog.database` makes its tables without Alembic."""

from __future__ import annotations

revision = "0010"
down_revision = None


def upgrade() -> None:
    pass
