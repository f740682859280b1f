"""Use case: offline planning from profiles."""
