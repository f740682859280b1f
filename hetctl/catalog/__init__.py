"""Profiles, runs and jobs in one SQLite file on the login node; the only package that imports SQLAlchemy."""
