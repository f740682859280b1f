"""Time of an epoch under the name that events and JSON give it."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.alter_column("epochs", "seconds", new_column_name="duration_s")
