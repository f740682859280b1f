"""Tables that no command read: events have what was in them."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    for table in ("allocations", "rounds", "checkpoints", "members"):
        op.drop_table(table)
