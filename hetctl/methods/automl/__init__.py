"""Searches for configurations and their epochs: grid, random, Hyperband, ASHA, PBT, Optuna."""
