"""Shapes of measured members, by which a point holds for all members of its shape."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("profile_points", sa.Column("shape", sa.String(), nullable=False, server_default=""))
