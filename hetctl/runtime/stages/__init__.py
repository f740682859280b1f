"""Pipelines in training: stages, their exchange of tensors, parameter servers, and checkpoints (HetPipe)."""
