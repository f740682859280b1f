"""Predictions from measurements: pure functions of values."""
