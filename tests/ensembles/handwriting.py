"""scikit-learn's handwritten digits, without importing it: that takes longer than training here.

What networks of several frameworks need is here, since a process should not import two of them.
"""

import importlib.util
import os
import signal
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from hetctl import partitions

FILE = Path(importlib.util.find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"
SAMPLES = 640


def input_fn(_path):
    """Return 640 digits, and 200 others that are held out."""
    x, y = digits()
    return (x[:SAMPLES], y[:SAMPLES]), (x[SAMPLES : SAMPLES + 200], y[SAMPLES : SAMPLES + 200])


def staged_input_fn(_data, path=None):
    """Return the samples of a part; without one 640 digits, and 80 others that are held out."""
    if path is not None:
        return partitions.read(path)
    x, y = digits()
    return (x[:640], y[:640]), (x[640:720], y[640:720])


def evaluate_fn(outputs, targets, config):
    """Return the area under the curve of zeros against others, and whether each sample comes in its place."""
    zero, score = targets == 0, outputs[:, 0]
    pairs = score[zero][:, None] - score[~zero]
    in_order = np.array_equal(targets, digits()[1][640:840])
    return {"auc": np.mean((pairs > 0) + 0.5 * (pairs == 0)), "in_order": in_order, **config.get("more", {})}


def digits():
    """Return images of 8 x 8 pixels from 0 to 1, and what they show."""
    rows = np.loadtxt(FILE, delimiter=",")
    return (rows[:, :-1] / 16).astype("float32").reshape(-1, 8, 8, 1), rows[:, -1].astype(int)


def load_digits():
    """Return them as scikit-learn does."""
    x, y = digits()
    return SimpleNamespace(images=16 * x[..., 0], target=y)


def note(arrays, config):
    """Append a checksum of arrays to the file of this rank."""
    with Path(f"{config['noted']}-{os.environ.get('HETCTL_DEVICE', 'alone')}").open("a") as file:
        print(zlib.crc32(b"".join(array.tobytes() for array in arrays)), file=file)


def failing(data, rank, config):
    """Yield batches; in the midst of them do to a rank what `how` says, if there is such a key."""
    for number, batch in enumerate(data):
        if number == 3 and rank == config.get("rank") and not (done := Path(config["done"])).exists():
            done.touch()
            FAULTS[config["how"]]()
        yield batch


def _raise():
    raise ValueError("this rank has had enough")


FAULTS = {"raise": _raise, "kill": lambda: os.kill(os.getpid(), signal.SIGKILL)}


class LoggedRows:
    """Digits that are read by number; each reading is noted in the file that `READINGS` names."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        node = os.environ.get("SLURMD_NODENAME", "here")
        with Path(os.environ["READINGS"]).open("a") as file:
            file.write(f"{node} {number}\n")
        return self.x[number], self.y[number]


def rows_input_fn(path):
    """Digits as a dataset, and arrays to validate with."""
    training, validation = input_fn(path)
    return LoggedRows(*training), validation
