"""Use cases of a run: submit, advance, cancel, status."""
