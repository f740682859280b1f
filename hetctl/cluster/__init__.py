"""Batch systems, launchers and job scripts: all differences between clusters."""
