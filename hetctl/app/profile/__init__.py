"""Use case: measurement of an ensemble's rates at a site."""
