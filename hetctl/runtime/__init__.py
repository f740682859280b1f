"""Inside a batch job: the driver of its rounds, the agents of its nodes, the workers on its GPUs."""
