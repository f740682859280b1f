"""Profiles, runs and jobs in one SQLite file, on the login side; the only package that imports SQLAlchemy."""
