"""Use cases of a run: submit, advance, collect, cancel, status."""
