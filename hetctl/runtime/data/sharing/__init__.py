"""Shared batches of the trainers on one node: files in memory, without a server process."""
