"""Networks for the Slurm tests: they train for real, at a pace that does not depend on the machine."""

import fcntl
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from handwriting import digits
from torch import nn

SAMPLES = 640
BATCH_S = float(os.environ.get("CREW_BATCH_S", "0.1"))
WITNESSES = Path(os.environ["CREW_WITNESSES"])


def input_fn(path):
    """Return digits, each batch of which takes `BATCH_S` to read."""
    hold_own_gpu()
    x, y = digits()
    return (SlowArray(x[:SAMPLES]), y[:SAMPLES]), (x[SAMPLES:1000], y[SAMPLES:1000])


def accuracy(outputs, targets):
    """Return the share of right answers."""
    return (outputs.argmax(1) == targets).float().mean()


def model_fn(config):
    """Build one hidden layer."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, config["units"]), nn.ReLU(), nn.Linear(config["units"], 10)
    )
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.002),
        "loss": nn.CrossEntropyLoss(),
        "metrics": {"accuracy": accuracy},
    }


def hold_own_gpu():
    """Hold a lock on this rank's GPU as long as the process lives; a second holder is a violation."""
    gpu = f"{os.environ.get('SLURMD_NODENAME')}-{os.environ.get('HETCTL_DEVICE')}"
    lock = os.open(WITNESSES / f"{gpu}.lock", os.O_CREAT | os.O_WRONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kind = "held"
    except BlockingIOError:
        kind = "violation"
    step, job = os.environ.get("SLURM_STEP_ID"), os.environ.get("SLURM_JOB_ID")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    record = {"kind": kind, "gpu": gpu, "visible": visible, "job": job, "step": step, "pid": os.getpid()}
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
