"""Batch systems, launchers and job scripts: all that differs from one cluster to the next."""
