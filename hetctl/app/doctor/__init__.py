"""Use case: check of a site."""
