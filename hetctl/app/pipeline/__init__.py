"""Use cases of pipelines."""
