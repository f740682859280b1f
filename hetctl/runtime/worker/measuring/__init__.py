"""Measuring tasks: members, layers, links and preprocessing in profiling, groups for `hetctl doctor`."""
