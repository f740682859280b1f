"""Use case: examine a site."""
