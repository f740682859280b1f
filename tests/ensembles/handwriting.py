"""scikit-learn's handwritten digits, without importing it: that takes longer than training here."""

import importlib.util
from pathlib import Path

import numpy as np

from hetctl import partitions

FILE = Path(importlib.util.find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"


def part_input_fn(_data, path):
    """Return the samples in a file; the first eight are held out as well."""
    part = np.load(path)
    return (part["x"], part["y"]), (part["x"][:8], part["y"][:8])


def staged_input_fn(_data, path=None):
    """Return the samples of a part; without one 640 digits, and 80 others that are held out."""
    if path is not None:
        return partitions.read(path)
    x, y = digits()
    return (x[:640], y[:640]), (x[640:720], y[640:720])


def digits():
    """Return images of 8 x 8 pixels from 0 to 1, and what they show."""
    rows = np.loadtxt(FILE, delimiter=",")
    return (rows[:, :-1] / 16).astype("float32").reshape(-1, 8, 8, 1), rows[:, -1].astype(int)
