"""Train an ensemble of different neural networks on a Slurm or LSF cluster."""

__version__ = "0.1.0"
