"""Accuracy with balanced and with equal batches: the same samples in the same order, in both frameworks.

python tests/benchmarks/accuracy_bench.py [--quick] [--plot]
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from paced_project import BATCH, HERE, MODULES, WORKERS, PacedProject
from tables import Figure, Table

from hetctl.methods.balance.observation_log import counted, records_in
from hetctl.storage.progress_fold import events_in

EPOCHS, SEEDS = 20, 3
PACE = 0.25
"""Of the workers with balanced batches. With equal ones nobody sleeps: results do not depend on times."""
NAMES = {"tensorflow": "TensorFlow", "pytorch": "PyTorch"}
EQUAL, BALANCED, UNWEIGHTED = "equal batches", "balanced", "balanced, plain mean"
MODES = {EQUAL: "off", BALANCED: "{mode: on, manager: curve}"}
CONFIG = {"learning_rate": 0.1, "momentum": 0.9}
BARS = {"accuracy": 0.0028, "loss": 1e-3}
"""Differences between runs that differ by rounding alone: one sample of the validation."""
SHOWN = (1, 2, 5, 10, 15, 20)
"""Epochs in the table."""
STYLES: dict[str, dict[str, Any]] = {
    EQUAL: {"color": "lightskyblue", "linewidth": 5},
    BALANCED: {"color": "black", "linewidth": 1},
    UNWEIGHTED: {"color": "tab:red", "linewidth": 1, "linestyle": "--"},
}
IMAGE = HERE.parents[1] / "docs" / "images" / "balanced-accuracy.svg"


Curve = tuple[float, ...]


@dataclass(frozen=True)
class Curves:
    """Validation accuracies and losses of each seed by epoch, and the last batch sizes if not all equal."""

    accuracies: tuple[Curve, ...]
    losses: tuple[Curve, ...]
    sizes: tuple[int, ...]

    @property
    def means(self) -> list[float]:
        """Means of the accuracies, by epoch."""
        return [statistics.fmean(values) for values in zip(*self.accuracies, strict=True)]


def table(quick: bool = False) -> Table:
    """Train with and without balancing, and with gradients that are not weighted."""
    found = measured(quick)
    rows = [
        (
            f"{NAMES[framework]}, {method}",
            *(f"{curves.means[epoch - 1]:.4f}" for epoch in SHOWN),
            f"{statistics.stdev(curve[-1] for curve in curves.accuracies):.4f}",
        )
        for (framework, method), curves in found.items()
    ]
    figures = []
    for framework, name in NAMES.items():
        equal, balanced = found[framework, EQUAL], found[framework, BALANCED]
        accuracy = _difference(equal.accuracies, balanced.accuracies)
        loss = _difference(equal.losses, balanced.losses)
        figures += [
            Figure(f"{name}: difference of accuracies by balancing, largest", accuracy, BARS["accuracy"]),
            Figure(f"{name}: difference of validation losses by balancing, largest", loss, BARS["loss"]),
        ]
    seeds, sizes = len(found["pytorch", EQUAL].accuracies), found["pytorch", BALANCED].sizes
    return Table(
        "Accuracy with balanced and equal batches",
        ("validation accuracy after epoch", *map(str, SHOWN), f"± after {EPOCHS}"),
        tuple(rows),
        tuple(figures),
        f"`hetctl submit` on `local` with {WORKERS} ranks of speeds 8:4:2:1 and {WORKERS * BATCH} samples a "
        f"step: a perceptron on scikit-learn's digits, 360 of them for validation. Means of {seeds} seeds; ± "
        f"is their standard deviation. `curve` balances, in PyTorch at last to {', '.join(map(str, sizes))}. "
        "Plain mean: gradients of such batches averaged without weights (Equation 6), by one process. "
        "Differences are of all seeds and epochs.",
    )


@cache
def measured(quick: bool = False) -> dict[tuple[str, str], Curves]:
    """Return the curves by framework and method."""
    seeds = range(2 if quick else SEEDS)
    found = {}
    with tempfile.TemporaryDirectory(prefix="hetctl-accuracy-", dir="/tmp") as name:
        for number, (framework, method) in enumerate(itertools.product(MODULES, MODES)):
            folder = Path(name) / str(number)
            folder.mkdir()
            found[framework, method] = _train(folder, framework, method, seeds)
    return found | {("pytorch", UNWEIGHTED): _unweighted(seeds, found["pytorch", BALANCED].sizes)}


def _train(folder: Path, framework: str, method: str, seeds: Sequence[int]) -> Curves:
    configs = [{**CONFIG, "seed": seed, "pace": PACE * (method == BALANCED)} for seed in seeds]
    stop = {"metric": "val_accuracy", "patience": 999, "max_epochs": EPOCHS}
    run = PacedProject(framework, "train_fn", MODES[method], stop, configs).train(folder)
    epochs = [event for event in events_in(run) if event.kind == "epoch"]

    def curves(key: str) -> tuple[Curve, ...]:
        return tuple(
            tuple(event.data["metrics"][key] for event in epochs if event.source == f"s{seed}")
            for seed in seeds
        )

    logs = sorted(run.balance.glob("*.jsonl"))
    sizes = _last_sizes(logs[0]) if logs else ()
    return Curves(curves("val_accuracy"), curves("val_loss"), sizes)


def _last_sizes(log: Path) -> tuple[int, ...]:
    with log.open(encoding="utf-8") as lines:
        return counted(records_in(lines))[-1].answer


def _unweighted(seeds: Sequence[int], sizes: tuple[int, ...]) -> Curves:
    # Imports PyTorch, which other benches do without.
    from unweighted import accuracies

    configs = [{**CONFIG, "seed": seed} for seed in seeds]
    members = [crc32(f"0/s{number}".encode()) for number in range(len(seeds))]
    found = [
        accuracies(config, member, sizes, EPOCHS) for config, member in zip(configs, members, strict=True)
    ]
    return Curves(tuple(map(tuple, found)), (), sizes)


def _difference(one: tuple[Curve, ...], other: tuple[Curve, ...]) -> float:
    """Return the largest difference of any seed and epoch."""
    pairs = (pair for curves in zip(one, other, strict=True) for pair in zip(*curves, strict=True))
    return max(abs(a - b) for a, b in pairs)


def plot(path: Path, quick: bool = False) -> None:
    """Draw the mean accuracies by epoch, without and with balancing."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = measured(quick)
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    panels = figure.subplots(1, len(NAMES), sharey=True)
    for axes, (framework, name) in zip(panels, NAMES.items(), strict=True):
        for method, style in STYLES.items():
            if (framework, method) in found:
                means = found[framework, method].means
                axes.plot(range(1, EPOCHS + 1), means, label=method, **style)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("epoch")
        axes.grid(axis="y", linewidth=0.3)
    panels[0].set_ylabel("validation accuracy")
    panels[-1].legend(fontsize=8, frameon=False, loc="lower right")
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
    if "--plot" in sys.argv:
        plot(IMAGE, "--quick" in sys.argv)
