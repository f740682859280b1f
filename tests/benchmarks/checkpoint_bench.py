"""Cost of checkpoints for a training that continues while they are written.

A network of some ten million parameters trains as hetctl trains it: stretches of steps that begin with a
checkpoint, and as many without, in turn. Each stretch is put together from the medians of its steps over
all rounds, so that what else the machine does at times does not count.

    python tests/benchmarks/checkpoint_bench.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tables import Figure, Table

from hetctl.model.ensemble import Member
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import TrainableNetwork, load_framework
from hetctl.runtime.worker.async_checkpoint import Saver
from hetctl.runtime.worker.checkpoint import CheckpointFolder, Manifest, TrainingState
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import UserFunctions

WIDTH, CLASSES, BATCH = 2048, 10, 64
STRETCH_S, EPOCH_S = 1.5, 10.0
ROUNDS, WARM_UP_STEPS = 13, 10


def torch_network(_config: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch import nn

    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "loss": nn.CrossEntropyLoss(),
    }


def keras_network(_config: dict[str, Any]) -> Any:
    import keras

    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(), loss=loss)
    return model


NETWORKS = {"pytorch": torch_network, "tensorflow": keras_network}


@dataclass
class Cost:
    """Seconds of each round: of the steps without and with a checkpoint, of copying and of writing it."""

    without_s: list[list[float]] = field(default_factory=list)
    with_s: list[list[float]] = field(default_factory=list)
    copying_s: list[float] = field(default_factory=list)
    writing_s: list[float] = field(default_factory=list)
    bytes: int = 0

    @property
    def added_s(self) -> float:
        """What a checkpoint adds to the steps."""
        return _usual(self.with_s) - _usual(self.without_s)


class Training:
    """A network that trains for so many steps at a time."""

    def __init__(self, framework: str) -> None:
        chosen = load_framework(framework)
        chosen.prepare((0,), None, 0)
        rng = np.random.default_rng(0)
        self._x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
        self._y = rng.integers(0, CLASSES, BATCH)
        functions = UserFunctions(lambda _: None, NETWORKS[framework], None)
        self.network: TrainableNetwork = chosen.build(Member("m", {}), functions, Group(), (self._x, self._y))

    def steps(self, count: int) -> list[float]:
        """Train; return the seconds of each step."""
        numbers = np.arange(count * BATCH) % BATCH
        source = ArraySource(self._x[numbers], self._y[numbers], "training")
        loader = ArrayLoader(source, Stream(len(source), BATCH, 0))
        ends = [time.perf_counter()]
        batches = Batches(loader, 1, 0, Group(), lambda: False, lambda _: ends.append(time.perf_counter()))
        self.network.train(batches)
        return np.diff(ends).tolist()


def cost_of(framework: str, rounds: int) -> Cost:
    """Measure stretches with a checkpoint and without."""
    training, cost = Training(framework), Cost()
    training.steps(WARM_UP_STEPS)
    count = round(STRETCH_S / statistics.median(training.steps(WARM_UP_STEPS)))
    written: list[tuple[Manifest, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(CheckpointFolder(Path(folder)))
        for number in range(rounds):
            began = time.perf_counter()
            state = TrainingState(part_samples=number)
            saver.save(training.network.save(), state, lambda *report: written.append(report))
            copied = time.perf_counter()
            steps = training.steps(count)
            trained = time.perf_counter()
            saver.wait()
            waiting_s = time.perf_counter() - trained
            cost.with_s.append([copied - began, *steps, waiting_s])
            cost.without_s.append(training.steps(count))
            cost.copying_s.append(copied - began)
        saver.close()
    cost.writing_s = [seconds for _, seconds in written]
    cost.bytes = written[0][0].bytes
    return cost


def _usual(rounds: list[list[float]]) -> float:
    """Return the seconds of a round whose every step takes what it takes in the median."""
    return sum(map(statistics.median, zip(*rounds, strict=True)))


def measured(framework: str, rounds: int) -> Cost:
    """Measure in a process of its own: no two frameworks share one."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(cost_of, (framework, rounds))


def table(quick: bool = False) -> Table:
    """Set the medians out."""
    rounds = 3 if quick else ROUNDS
    found = {framework: measured(framework, rounds) for framework in NETWORKS}
    rows = tuple(
        (
            framework,
            f"{cost.bytes / 1e6:.0f}",
            f"{statistics.median(map(statistics.median, cost.without_s)) * 1000:.0f}",
            f"{statistics.median(cost.copying_s) * 1000:.0f}",
            f"{statistics.median(cost.writing_s) * 1000:.0f}",
            f"{cost.added_s * 1000:.0f}",
        )
        for framework, cost in found.items()
    )
    figures = tuple(
        Figure(
            f"added time of a checkpoint over an epoch of {EPOCH_S:g} s, {framework}",
            cost.added_s / EPOCH_S,
            0.01,
        )
        for framework, cost in found.items()
    )
    note = f"Three layers of {WIDTH} units, Adam, one core for the trainer; medians of {rounds} rounds."
    header = ("", "MB", "step, ms", "copying, ms", "writing, ms", "added, ms")
    return Table("Checkpoints", header, rows, figures, note)


def main() -> int:
    """Print the table; exit code 1: a bar is passed."""
    result = table("--quick" in sys.argv)
    print(result)
    return 0 if all(figure.holds for figure in result.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
