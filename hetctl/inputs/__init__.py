"""Readers of user-written files; a file with any error is rejected completely."""
