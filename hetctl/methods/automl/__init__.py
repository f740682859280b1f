"""Which configurations are tried, and for how many epochs: grid, random, Hyperband, ASHA, PBT, Optuna."""
