"""Kinds of events under the names that runs give them now."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"

RENAMED = {
    "step_started": "task_started",
    "step_ended": "task_ended",
    "sample_visits": "sample_accesses",
    "parts_staged": "partitions_staged",
}


def upgrade() -> None:
    for before, after in RENAMED.items():
        op.execute(f"UPDATE events SET kind = '{after}' WHERE kind = '{before}'")
