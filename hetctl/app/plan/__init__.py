"""Use case: from profiles to a plan, offline."""
