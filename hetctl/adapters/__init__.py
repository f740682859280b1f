"""Adapters between hetctl and scripts; each imports its framework, and is imported by scripts alone."""
