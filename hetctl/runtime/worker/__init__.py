"""The worker: the rank on one GPU, which runs one task after another."""
