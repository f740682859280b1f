"""Shared batches of the trainers on one node: files in memory, no server process."""
