"""Conversion of the data that ``input_fn`` returns to the batches of each rank."""
