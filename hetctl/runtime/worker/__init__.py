"""The worker: the rank on one GPU, which does one task after another."""
