"""The driver of a batch job: starts agents, assigns tasks to ranks, and records how they end."""
