"""Start of a job before its first member's, which a profile measures."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("profile_points", sa.Column("job_start_s", sa.Float(), nullable=False, server_default="0"))
