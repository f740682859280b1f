"""Planners and scheduling of a real run under a virtual clock."""
