"""From what ``input_fn`` returned to the batches of each rank."""
