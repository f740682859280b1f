"""Reasons of jobs and plans under the name that JSON gives them."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.alter_column("jobs", "detail", new_column_name="reason")
    for table, column in (("plans", "value"), ("runs", "plan")):
        op.execute(f"""UPDATE {table} SET {column} = replace({column}, '"why":', '"reason":')""")
