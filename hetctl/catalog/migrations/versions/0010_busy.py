"""Share of the time for which a member keeps its GPU busy, which a profile measures."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("profile_points", sa.Column("busy", sa.Float(), nullable=True))
