"""One file per schema, numbered in order."""
