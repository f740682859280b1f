"""The agent: one process on each node of a job, which forks the ranks of that node."""
