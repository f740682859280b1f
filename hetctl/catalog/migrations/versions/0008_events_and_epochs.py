"""Tables of what the files of runs say: commands read those, through the snapshots of their states."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    for table in ("epochs", "events", "collected_files"):
        op.drop_table(table)
