"""All that the login side remembers, in one SQLite file; the only package that knows SQLAlchemy."""
