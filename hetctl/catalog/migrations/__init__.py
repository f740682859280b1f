"""Steps from one schema to the next; Alembic reads this folder, installed or not."""
