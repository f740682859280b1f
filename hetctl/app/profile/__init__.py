"""Use case: measured rates of an ensemble at a site."""
