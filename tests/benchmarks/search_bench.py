"""ASHA as a run of hetctl, by Ray Tune and by Optuna with a pool of processes.

python tests/benchmarks/search_bench.py [--quick]
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paced_bench import hetctl
from search_trainable import loss_after
from tables import Figure, Table

from hetctl.storage.paths import Home
from hetctl.storage.progress_fold import events_in

HERE = Path(__file__).parent
HETCTL = "hetctl"
TRIALS, WORKERS, SEEDS = 64, 8, 20
RUNGS = FIRST, ETA, LAST = 1, 4, 16
RIVALS = {"ray": "Ray Tune, ASHAScheduler", "optuna": "Optuna, SuccessiveHalvingPruner"}
NETWORKS = """\
import time
import numpy as np
import torch
from search_trainable import loss_after, pace

class Counting(torch.nn.Module):
    \"\"\"A network whose output is the number of its epochs.\"\"\"

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("epochs", torch.zeros(1))

    def forward(self, x):
        return x[:, :1] * self.weight + self.epochs

def input_fn(_data):
    x, y = np.zeros((8, 1), np.float32), np.zeros((8, 1), np.float32)
    return (x, y), (x, y)

def model_fn(config):
    model = Counting()
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),
        "loss": torch.nn.MSELoss(),
    }

def train_fn(data, model, optimizer, config):
    began = time.monotonic()
    for x, y in data:
        model(x).sum().backward()
        optimizer.step()
    pace(config, began)
    model.epochs += 1
    return {"loss": 0.0}

def evaluate_fn(outputs, targets, config):
    return {"floor": loss_after(config, int(outputs[0, 0]))}
"""
ENSEMBLE = """\
name: asha
framework: pytorch
functions:
  input_fn: networks:input_fn
  model_fn: networks:model_fn
  train_fn: networks:train_fn
  evaluate_fn: networks:evaluate_fn
samples_per_epoch: 8
rate_keys: [width]
search:
  method: asha
  trials: {trials}
  epochs: {last}
  min_epochs: {first}
  eta: {eta}
  seed: {seed}
  batch_size: 8
  max_gpus: 1
  stop: {{metric: val_floor}}
  space:
    learning_rate: {{log_uniform: [0.0001, 1.0]}}
    width: {{choice: [1, 2, 4]}}
"""
SITE = f"extends: local\ngpus_per_node: {WORKERS}\ncores_per_node: {WORKERS}\n"


@dataclass(frozen=True)
class TrainedEpoch:
    """An epoch of a trial; times in seconds since the epoch of the system."""

    trial: int
    epoch: int
    ended_at: float
    seconds: float


@dataclass(frozen=True)
class Search:
    """Epochs of a search, in the order of their ends, and the configs of its trials."""

    configs: Sequence[Mapping[str, float]]
    epochs: Sequence[TrainedEpoch]

    @property
    def best(self) -> float:
        return min(map(self._loss, self.epochs))

    def to(self, loss: float) -> tuple[float, float]:
        """Return GPU-seconds in training, and seconds since the first epoch began, until a loss."""
        began = min(epoch.ended_at - epoch.seconds for epoch in self.epochs)
        end = next(epoch.ended_at for epoch in self.epochs if self._loss(epoch) <= loss)
        busy = sum(max(0.0, min(end, e.ended_at) - (e.ended_at - e.seconds)) for e in self.epochs)
        return busy, end - began

    def _loss(self, epoch: TrainedEpoch) -> float:
        return loss_after(self.configs[epoch.trial], epoch.epoch)


def table(quick: bool = False) -> Table:
    """Search with each of the three for several seeds."""
    found = [searches(seed) for seed in range(1 if quick else SEEDS)]
    rows, figures = [], []
    for name in (HETCTL, *RIVALS):
        whole = [whole_of(by_name[name]) for by_name in found]
        middle = [statistics.median(values) for values in zip(*whole, strict=True)]
        rows.append((RIVALS.get(name, name), *(f"{value:.4g}" for value in middle)))
    for rival, shown in RIVALS.items():
        figures += _figures(f"over {shown}", [(by_name[HETCTL], by_name[rival]) for by_name in found])
    return Table(
        f"ASHA with {TRIALS} trials on {WORKERS} paced workers",
        ("by", "GPU s", "s", "epochs", "best loss"),
        tuple(rows),
        tuple(figures),
        "The same configs for all three, in the same order; epochs sleep for 0.4, 0.8 or 1.6 s by the width. "
        f"Rungs of {FIRST} epoch, {FIRST * ETA} and {LAST}. GPU-seconds are those of epochs; seconds count "
        f"from the start of the first epoch. Medians of {len(found)} seeds.",
    )


def _figures(who: str, pairs: Sequence[tuple[Search, Search]]) -> Iterator[Figure]:
    """Yield the medians of ratios between two searches of each seed."""
    both = [(own.to(max(own.best, other.best)), other.to(max(own.best, other.best))) for own, other in pairs]
    for at, what in enumerate(("GPU-seconds", "time")):
        ratio = statistics.median(own[at] / other[at] for own, other in both)
        yield Figure(f"{what} to the best loss that both reach, {who}", ratio, 1.0)
    yield Figure(f"best loss, {who}", statistics.median(own.best / other.best for own, other in pairs), 1.0)


def whole_of(search: Search) -> tuple[float, ...]:
    """Return GPU-seconds, seconds, epochs and best loss of a search."""
    began = min(epoch.ended_at - epoch.seconds for epoch in search.epochs)
    gpu_s = sum(epoch.seconds for epoch in search.epochs)
    return gpu_s, search.epochs[-1].ended_at - began, len(search.epochs), search.best


def searches(seed: int) -> dict[str, Search]:
    """Search the configs of a seed with each of the three."""
    with tempfile.TemporaryDirectory() as name:
        own = _by_hetctl(Path(name), seed)
        return {HETCTL: own, **{rival: _by_rival(Path(name), rival, own.configs) for rival in RIVALS}}


def _by_hetctl(folder: Path, seed: int) -> Search:
    home = folder / HETCTL
    (home / "site-configs").mkdir(parents=True)
    (home / "site-configs" / "lab.yaml").write_text(SITE)
    (home / "networks.py").write_text(NETWORKS)
    shutil.copy(HERE / "search_trainable.py", home)
    text = ENSEMBLE.format(trials=TRIALS, first=FIRST, eta=ETA, last=LAST, seed=seed)
    (home / "ensemble.yaml").write_text(text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}
    environment = {**kept, "HETCTL_SITE": "lab"}
    hetctl(home, environment, "profile")
    hetctl(home, environment, "submit", "--gpus", str(WORKERS), "--time", "20m", "--wait")
    shown = hetctl(home, environment, "search", "show")
    configs = [trial["config"] for trial in sorted(shown["trials"], key=lambda trial: trial["number"])]
    numbers = {trial["member"]: trial["number"] for trial in shown["trials"]}
    # A trial that goes on reports its last epoch again.
    epochs = {
        TrainedEpoch(numbers[e.source], e.data["epoch"], e.data["finished_at"], e.data["duration_s"])
        for e in events_in(Home(home / ".hetctl").run("asha-001"))
        if e.kind == "epoch"
    }
    return Search(configs, sorted(epochs, key=lambda epoch: epoch.ended_at))


def _by_rival(folder: Path, rival: str, configs: Sequence[Mapping[str, float]]) -> Search:
    own = folder / rival
    own.mkdir()
    task: dict[str, Any] = {"configs": configs, "workers": WORKERS, "rungs": RUNGS, "folder": str(own)}
    (own / "task.json").write_text(json.dumps(task))
    command = [sys.executable, str(HERE / "search_rivals.py"), rival, str(own / "task.json")]
    subprocess.run(command, check=True, capture_output=True)
    lines = (own / "epochs.jsonl").read_text().splitlines()
    epochs = [TrainedEpoch(e["trial"], e["epoch"], e["time"], e["seconds"]) for e in map(json.loads, lines)]
    return Search(configs, sorted(epochs, key=lambda epoch: epoch.ended_at))


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
