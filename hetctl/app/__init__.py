"""Use cases: one function for each command, over the planners, the catalog and the batch system."""
