"""Networks for the Slurm tests: they train for real, at a pace that does not depend on the machine."""

import fcntl
import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

SAMPLES = 640
BATCH_S = float(os.environ.get("CREW_BATCH_S", "0.1"))
WITNESSES = Path(os.environ["CREW_WITNESSES"])


def input_fn(path):
    """Return digits, each batch of which takes `BATCH_S` to read."""
    hold_own_gpu()
    digits = load_digits()
    x, y = (digits.images / 16.0).astype("float32")[..., None], digits.target
    return (SlowArray(x[:SAMPLES]), y[:SAMPLES]), (x[SAMPLES:1000], y[SAMPLES:1000])


def model_fn(config):
    """Build one hidden layer."""
    layers = [keras.layers.Flatten(), keras.layers.Dense(config["units"], activation="relu")]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(10)])
    model.compile(
        optimizer=keras.optimizers.Adam(0.002),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def hold_own_gpu():
    """Hold a lock on this rank's GPU as long as the process lives; a second holder is a violation."""
    gpu = f"{os.environ.get('SLURMD_NODENAME')}-{os.environ.get('CUDA_VISIBLE_DEVICES')}"
    lock = os.open(WITNESSES / f"{gpu}.lock", os.O_CREAT | os.O_WRONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kind = "held"
    except BlockingIOError:
        kind = "violation"
    step, job = os.environ.get("SLURM_STEP_ID"), os.environ.get("SLURM_JOB_ID")
    seat = sys.argv[sys.argv.index("--seat") + 1] if "--seat" in sys.argv else None
    record = {"kind": kind, "gpu": gpu, "job": job, "step": step, "seat": seat, "time": time.time()}
    with (WITNESSES / "witness.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


class SlowArray(np.ndarray):
    """An array whose batches take a while to read."""

    def __new__(cls, values):
        """Take over the values."""
        return np.asarray(values).view(cls)

    def __getitem__(self, key):
        """Wait where a batch is read."""
        if isinstance(key, np.ndarray):
            time.sleep(BATCH_S)
            return np.asarray(self)[key]
        return super().__getitem__(key)
