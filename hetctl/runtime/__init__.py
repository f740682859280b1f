"""Processes inside a batch job: the driver of its rounds, the agents of its nodes, the ranks on its GPUs."""
