"""Accuracy of pipelines with waves beside one GPU and data-parallel training, on images of CIFAR's size.

python tests/benchmarks/stage_accuracy_bench.py [--quick] [--plot]
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paced_bench import hetctl
from stages_bench import SITE
from tables import Figure, Table
from textured_digits import HELD_OUT, NETWORKS, TRAINING, VALIDATION
from visits_bench import running

sys.path.insert(0, str(Path(__file__).parent.parent))
from slurm_cluster import SlurmCluster, missing_programs

from hetctl.storage.paths import Home
from hetctl.storage.progress_fold import events_in

HERE = Path(__file__).parent
SEEDS, BATCH = 5, 16
"""First weights of each network, and samples of a minibatch."""
LENGTHS = {"vgg": (7, 10), "resnet": (15, 20)}
"""Epochs after which the rate falls to a tenth, and all epochs: the ResNet-like network converges later."""
BETAS = (0.5, 0.99)
RATE = 0.001
IN_FLIGHT, DISTANCES, WORKERS = 3, (0, 4), 2
ALONE, PLAIN = "one GPU", "data-parallel"
NAMES = {"vgg": "VGG-like", "resnet": "ResNet-like"}
SHOWN = (1, 2, 4, 6, 7, 8, 10, 12, 15, 16, 18, 20)
"""Epochs in the table."""
LOSS = 0.02
"""Bar of the accuracy that waves may cost, mean of all seeds."""


@dataclass(frozen=True)
class Way:
    """A way to train the members.

    Parameters
    ----------
    options : tuple of str
        Of ``hetctl submit``.
    factor : float
        Learning rate of the ensemble file over `RATE`.
    beside : tuple of str
        The ways whose accuracy this one is to have.
    """

    options: tuple[str, ...]
    factor: float = 1.0
    beside: tuple[str, ...] = ()


def _pipelines(factor: float, *beside: str) -> dict[str, Way]:
    """Return pipelines with all clock distances."""
    shape = f"--mode pipeline --gpus {2 * WORKERS} --policy np --in-flight {IN_FLIGHT}".split()
    return {
        _name(distance, factor): Way((*shape, "--clock-distance", str(distance)), factor, beside)
        for distance in DISTANCES
    }


def _name(distance: int, factor: float) -> str:
    scaled = "" if factor == 1 else f", rate x {factor:.3g}"
    return f"pipelines, D = {distance}{scaled}"


# Each minibatch is an update, as on one GPU. One step of Adam for two minibatches with twice the rate is as
# long as two steps with the rate times the square root of 2, as far as gradients are noise
# (Malladi et al., NeurIPS 2022).
WAYS = {
    ALONE: Way(("--mode", "data-parallel", "--gpus", "2", "--planner", "fixed-1")),
    PLAIN: Way(("--mode", "data-parallel", "--gpus", "2", "--planner", "fixed-2")),
    **_pipelines(1.0, ALONE, PLAIN),
    **_pipelines(math.sqrt(WORKERS), PLAIN),
}
STYLES: dict[str, dict[str, Any]] = {
    PLAIN: {"color": "lightskyblue", "linewidth": 5},
    "pipelines, D = 0, rate x 1.41": {"color": "black", "linewidth": 1},
    "pipelines, D = 4, rate x 1.41": {"color": "tab:red", "linewidth": 1, "linestyle": "--"},
}
IMAGE = HERE.parents[1] / "docs" / "images" / "pipeline-accuracy.svg"
TITLE = "Pipelines in training: accuracy beside one GPU and data-parallel training"

Curve = tuple[float, ...]
"""Validation accuracies by epoch."""


def table(quick: bool = False) -> Table:
    """Train both networks on one GPU, data-parallel, and as pipelines with two clock distances."""
    if missing := missing_programs():
        return Table(TITLE, (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    found = measured(quick)
    rows, figures = [], []
    for (network, name), curves in found.items():
        means = _means(curves)
        last = ", ".join(f"{curve[-1]:.4f}" for curve in curves)
        cells = (f"{means[epoch - 1]:.3f}" if epoch <= len(means) else "" for epoch in SHOWN)
        rows.append((f"{NAMES[network]}, {name}", *cells, last))
        for beside in WAYS[name].beside:
            lost = _means(found[network, beside])[-1] - means[-1]
            figures.append(
                Figure(f"{NAMES[network]}: final accuracy lost by {name}, to {beside}", lost, LOSS)
            )
    seeds = len(found["vgg", PLAIN])
    lengths = " ".join(
        f"The {NAMES[network]} network trains {epochs} epochs, with a tenth of the rate after the {falls}th."
        for network, (falls, epochs) in LENGTHS.items()
    )
    note = (
        f"`hetctl submit` on nodes with 2 slots of a real Slurm, PyTorch: {ALONE} (a slot), {PLAIN} on 2 "
        f"slots, and {WORKERS} virtual workers x 2 stages with N_m = {IN_FLIGHT}, minibatches of {BATCH} on "
        f"each rank or virtual worker. Adam with a rate of {RATE}, or that times the factor named; {PLAIN} "
        f"has twice the rate (`rescale_learning_rate`). {lengths} "
        f"{TRAINING:,} images of 32 x 32 x 3: "
        "scikit-learn's digits near the centre of random textures, under noise; for validation "
        f"{VALIDATION:,} images of {HELD_OUT} other digits. Means of {seeds} first weights, and the final "
        "accuracy of each."
    )
    header = ("validation accuracy after epoch", *map(str, SHOWN), "final, by first weights")
    return Table(TITLE, header, tuple(rows), tuple(figures), note)


def _means(curves: Sequence[Curve]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]


@cache
def measured(quick: bool = False) -> dict[tuple[str, str], tuple[Curve, ...]]:
    """Return the curves of all seeds by network and way."""
    members = {f"{network}-{seed}": network for network in NETWORKS for seed in range(1 if quick else SEEDS)}
    by_way = {}
    with tempfile.TemporaryDirectory(prefix="hetctl-stages-", dir="/tmp") as folder, running() as cluster:
        for number, (name, way) in enumerate(WAYS.items()):
            by_way[name] = _train(cluster, Path(folder) / str(number), members, way, quick)
    return {
        (network, name): tuple(curves[member] for member, own in members.items() if own == network)
        for network in NETWORKS
        for name, curves in by_way.items()
    }


def _train(
    cluster: SlurmCluster, folder: Path, members: dict[str, str], way: Way, quick: bool
) -> dict[str, Curve]:
    """Submit a run and wait for its end; return the curve of each member."""
    (folder / "site-configs").mkdir(parents=True)
    shutil.copy(HERE / "textured_digits.py", folder)
    entries = [_entry(name, network, RATE * way.factor, quick) for name, network in members.items()]
    functions = {"input_fn": "textured_digits:input_fn", "model_fn": "textured_digits:model_fn"}
    (folder / "ensemble.yaml").write_text(
        f"name: textured\nframework: pytorch\nfunctions: {json.dumps(functions)}\nbatch_size: {BATCH}\n"
        f"members: {json.dumps(entries)}\n"
    )
    own = {name: value for name, value in cluster.environment().items() if name.startswith("OMPI")}
    (folder / "site-configs" / "lab.yaml").write_text(SITE.format(environment=json.dumps(own)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}
    environment = {**kept, **cluster.environment(), "HETCTL_SITE": "lab"}
    if "pipeline" in way.options:
        hetctl(folder, environment, "profile", *(word for name in members for word in ("--layers", name)))
    else:
        rates = [f"{name},{gpus},{100 * gpus},{TRAINING}\n" for name in members for gpus in (1, 2)]
        (folder / "rates.csv").write_text(f"member,gpus,rate,samples\n{''.join(rates)}")
        hetctl(folder, environment, "profile", "import", "rates.csv")
    hetctl(folder, environment, "submit", *way.options, "--time", "30m", "--wait")
    epochs_of = [
        event for event in events_in(Home(folder / ".hetctl").run("textured-001")) if event.kind == "epoch"
    ]
    return {
        name: tuple(one.data["metrics"]["val_accuracy"] for one in epochs_of if one.source == name)
        for name in members
    }


def _entry(name: str, network: str, rate: float, quick: bool) -> dict[str, Any]:
    """Return a member of the ensemble file."""
    falls, epochs = LENGTHS[network]
    config = {"network": network, "learning_rate": rate, "betas": BETAS, "falls_after": [falls]}
    stop = {"metric": "val_accuracy", "patience": 999, "max_epochs": 4 if quick else epochs}
    return {"name": name, "config": config, "stop": stop}


def plot(path: Path, quick: bool = False) -> None:
    """Draw the mean accuracies by epoch of both networks; nothing without Slurm."""
    if missing_programs():
        return
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Picture

    found = measured(quick)
    figure = Picture(figsize=(7, 3.2), layout="constrained")
    panels = figure.subplots(1, len(NAMES), sharey=True)
    for axes, (network, name) in zip(panels, NAMES.items(), strict=True):
        for way, style in STYLES.items():
            means = _means(found[network, way])
            axes.plot(range(1, len(means) + 1), means, label=way, **style)
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
