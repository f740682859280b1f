"""Pipelines: which layers go to which GPU, and which GPUs make up a virtual worker (HetPipe)."""
