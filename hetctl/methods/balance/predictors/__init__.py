"""Predictors of the speeds of workers."""
