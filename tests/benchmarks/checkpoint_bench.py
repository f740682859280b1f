"""What checkpoints cost a training that goes on while they are written.

A network of some ten million parameters trains as hetctl trains it, with a checkpoint before each epoch
and without one, in turn. Each framework has one core and a process of its own.

    python tests/benchmarks/checkpoint_bench.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tables import Figure, Table

from hetctl.core.ensemble import Member
from hetctl.runtime.checkpoint import CheckpointFolder, Manifest, TrainingState
from hetctl.runtime.data import Batches
from hetctl.runtime.feeds import ArrayFeed
from hetctl.runtime.frameworks import Network, load_framework
from hetctl.runtime.functions import UserFunctions
from hetctl.runtime.group import SingleRank
from hetctl.runtime.saver import Saver
from hetctl.runtime.sources import ArraySource
from hetctl.runtime.stream import Stream

WIDTH, CLASSES, BATCH = 2048, 10, 32
EPOCH_S, ROUNDS = 10.0, 4
WARM_UP_STEPS, TRIAL_STEPS = 5, 15


def torch_network(_config: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch import nn

    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(WIDTH, CLASSES))
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


@dataclass(frozen=True)
class Cost:
    """Seconds of an epoch without and with a checkpoint, of copying what goes into it, and of writing it."""

    without_s: float
    with_s: float
    copying_s: float
    writing_s: float
    bytes: int

    @property
    def share(self) -> float:
        """What the checkpoint adds to the epoch."""
        return self.with_s / self.without_s - 1


class Training:
    """A network that trains for so many steps at a time."""

    def __init__(self, framework: str) -> None:
        chosen = load_framework(framework)
        chosen.prepare((0,), 0)
        rng = np.random.default_rng(0)
        self._x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
        self._y = rng.integers(0, CLASSES, BATCH)
        functions = UserFunctions(lambda _: None, NETWORKS[framework], None)
        self.network: Network = chosen.build(Member("m", {}), functions, SingleRank(), (self._x, self._y))

    def seconds(self, steps: int) -> float:
        """Train; return what it took."""
        numbers = np.arange(steps * BATCH) % BATCH
        source = ArraySource(self._x[numbers], self._y[numbers], "training")
        feed = ArrayFeed(source, Stream(len(source), BATCH, 0))
        began = time.perf_counter()
        self.network.train(Batches(feed, 1, 0, SingleRank(), lambda: False))
        return time.perf_counter() - began


def costs(framework: str, rounds: int) -> Iterator[Cost]:
    """Measure epochs with and without a checkpoint in turn, the one first and then the other."""
    training = Training(framework)
    training.seconds(WARM_UP_STEPS)
    steps = round(EPOCH_S * TRIAL_STEPS / training.seconds(TRIAL_STEPS))
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(CheckpointFolder(Path(folder)))
        for number in range(rounds):
            without_s = training.seconds(steps) if number % 2 else 0.0
            cost = _with_checkpoint(training, saver, steps, number)
            yield Cost(without_s or training.seconds(steps), *cost)
        saver.close()


def _with_checkpoint(
    training: Training, saver: Saver, steps: int, number: int
) -> tuple[float, float, float, int]:
    written: list[tuple[Manifest, float]] = []
    began = time.perf_counter()
    arrays = training.network.save()
    copying_s = time.perf_counter() - began
    saver.save(arrays, TrainingState(part_samples=number), lambda *report: written.append(report))
    training.seconds(steps)
    saver.wait()
    with_s = time.perf_counter() - began
    return with_s, copying_s, written[0][1], written[0][0].bytes


def measured(framework: str, rounds: int) -> list[Cost]:
    """Measure in a process of its own: no two frameworks share one."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_listed, (costs, framework, rounds))


def _listed(measure: Callable[..., Iterator[Cost]], *arguments: Any) -> list[Cost]:
    return list(measure(*arguments))


def table(quick: bool = False) -> Table:
    """Set the medians out."""
    rounds = 1 if quick else ROUNDS
    rows, figures = [], []
    for framework in NETWORKS:
        found = measured(framework, rounds)
        share = statistics.median(cost.share for cost in found)
        times = [statistics.median(getattr(cost, name) for cost in found) for name in Cost.__annotations__]
        rows.append((framework, f"{times[4] / 1e6:.0f}", *(f"{t:.2f}" for t in times[:4]), f"{share:.2%}"))
        figures.append(Figure(f"share of an epoch that a checkpoint adds, {framework}", share, 0.01))
    header = ("", "MB", "epoch, s", "with a checkpoint, s", "copying, s", "writing, s", "adds")
    note = (
        f"Three layers of {WIDTH} units and Adam, one core of the trainer's own, epochs of some {EPOCH_S:g} s; "
        f"medians of {rounds} rounds."
    )
    return Table("Checkpoints", header, tuple(rows), tuple(figures), note)


def main() -> int:
    """Print the table; exit code 1: a bar is passed."""
    result = table("--quick" in sys.argv)
    print(result)
    return 0 if all(figure.holds for figure in result.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
