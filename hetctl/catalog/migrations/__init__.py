"""Migrations between schemas; Alembic reads this folder, installed or not."""
