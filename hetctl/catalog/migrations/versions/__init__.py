"""Migrations, one file per schema, numbered in order."""
