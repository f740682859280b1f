"""Positions up to which the event files of runs are collected."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "collected_files",
        sa.Column("run", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.Column("lines", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.name"], name=op.f("fk_collected_files_runs")),
        sa.PrimaryKeyConstraint("run", "source", name=op.f("pk_collected_files")),
    )
