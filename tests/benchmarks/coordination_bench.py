"""LB-BSP's Figure 6: updates per second, updates and time to a loss with ASP, SSP, BSP and LB-BSP.

Four workers that sleep as a table says train the same network from the same weights. BSP and LB-BSP are
hetctl's own (`hetctl submit`); ASP and SSP are processes with a parameter server.

    python tests/benchmarks/coordination_bench.py [--quick] [--plot]
    python tests/benchmarks/coordination_bench.py --rates MOMENTUM

The second line prints the time to the loss by learning rate; `RATES` has the best ones with momentum.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paced_project import BATCH, HERE, WORKERS, PacedProject
from tables import Figure, Table

IMAGE = HERE.parents[1] / "docs" / "images" / "coordination.svg"
BOUND = 5
"""Iterations by which SSP's workers may be ahead of the slowest one, as in the paper."""
TARGET, LIMIT_S = 0.12, 20.0
"""Validation loss, and seconds after which a run ends without it."""
EPOCHS = 10
"""Epochs of 12 steps, after which a run of hetctl ends without it."""
MOMENTUM, SEEDS = 0.9, 3
BSP, CURVE, GPU, SSP, ASP = "BSP", "LB-BSP, `curve`", "LB-BSP, `gpu`", "SSP", "ASP"
MODES = {BSP: "off", CURVE: "{mode: on, manager: curve}", GPU: "{mode: on, manager: gpu}"}
OURS = (CURVE, GPU)
BOUNDS = {SSP: BOUND, ASP: None}
TRIED = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
RATES = {BSP: 0.4, SSP: 0.05, ASP: 0.025}
"""The learning rate of least time to the loss. LB-BSP's updates are BSP's, and so is its rate."""


@dataclass(frozen=True)
class Trial:
    """Runs with one scheme and one learning rate, from the initial weights of each seed."""

    scheme: str
    learning_rate: float
    momentum: float = MOMENTUM
    seeds: int = SEEDS

    def configs(self, folder: Path) -> list[dict[str, Any]]:
        """Return the config of each run; the log is the file `out`."""
        shared = {"learning_rate": self.learning_rate, "momentum": self.momentum, "pace": 1.0}
        return [{**shared, "seed": seed, "out": str(folder / f"log-{seed}")} for seed in range(self.seeds)]


@dataclass(frozen=True)
class Course:
    """Validation loss after each update of the weights.

    Parameters
    ----------
    seconds : tuple of float
        Time of each, from the start of training.
    gradients : int
        Gradients in each, which the paper counts as updates.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    gradients: int

    @property
    def rate(self) -> float:
        """Updates per second."""
        return self.gradients * len(self.seconds) / self.seconds[-1]

    @property
    def reached(self) -> int | None:
        """Return the number, from 0, of the first update with a loss at the target."""
        return next((n for n, loss in enumerate(self.losses) if loss <= TARGET), None)

    @property
    def updates_needed(self) -> float:
        """Updates to the loss; infinite if it is not reached."""
        return math.inf if self.reached is None else self.gradients * (self.reached + 1)

    @property
    def seconds_needed(self) -> float:
        """Seconds to the loss; infinite if it is not reached."""
        return math.inf if self.reached is None else self.seconds[self.reached]


Courses = Sequence[Course]


def table(quick: bool = False) -> Table:
    """Compare all schemes at BSP's best rate, and ASP and SSP at their own ones."""
    found = measured(quick)
    alone = {trial: median(courses) for trial, courses in found.items()}
    bsp_s = alone[next(iter(found))][2]
    rows = [
        (
            trial.scheme,
            f"{trial.learning_rate:g}",
            f"{rate:.1f}",
            _number(updates, ",.0f"),
            _number(seconds, ".1f"),
            _number(seconds / bsp_s, ".2f"),
            f"{sum(course.reached is not None for course in found[trial])} of {trial.seeds}",
        )
        for trial, (rate, updates, seconds) in alone.items()
    ]
    ours = {trial.scheme: s for trial, (_, _, s) in alone.items() if trial.scheme in OURS}
    others = {trial: s for trial, (_, _, s) in alone.items() if trial.scheme not in OURS}
    same = min(s for trial, s in others.items() if trial.learning_rate == RATES[BSP])
    best = min(others.values())
    figures = [
        Figure(f"{scheme} over the best other{what}: time to the loss", seconds / other, 1.0)
        for scheme, seconds in ours.items()
        for what, other in ((", same learning rate", same), (", each at its best rate", best))
    ]
    return Table(
        "LB-BSP's Figure 6: workers with speeds 8:4:2:1",
        ("scheme", "learning rate", "updates/s", "updates to the loss", "seconds", "over BSP", "reached"),
        tuple(rows),
        tuple(figures),
        f"Real training (PyTorch, momentum {MOMENTUM:g}) of a perceptron on scikit-learn's digits until the "
        f"validation loss is {TARGET:g}, or for {LIMIT_S:g} s with ASP and SSP. A worker sleeps 20 ms and 1, "
        f"2, 4, 8 ms per sample, and has {BATCH} samples, with LB-BSP only at first. BSP and LB-BSP are "
        f"`hetctl submit` on `local`; ASP and SSP (bound {BOUND}) have a parameter server. A gradient is an "
        f"update, as in the paper. Medians over {1 if quick else SEEDS} initial weights.",
    )


@cache
def measured(quick: bool = False) -> dict[Trial, Courses]:
    """Run all trials; BSP comes first."""
    seeds = 1 if quick else SEEDS
    shared = [Trial(scheme, RATES[BSP], seeds=seeds) for scheme in (*MODES, *BOUNDS)]
    own = [Trial(scheme, RATES[scheme], seeds=seeds) for scheme in BOUNDS]
    return run_all([*shared, *own])


def rates(momentum: float) -> Table:
    """Measure the time to the loss of each scheme at each of the tried rates, with one seed."""
    schemes = (BSP, *BOUNDS)
    found = run_all([Trial(scheme, rate, momentum, 1) for scheme in schemes for rate in TRIED])
    rows = [
        (
            scheme,
            *(_number(found[Trial(scheme, rate, momentum, 1)][0].seconds_needed, ".1f") for rate in TRIED),
        )
        for scheme in schemes
    ]
    title = f"Seconds to the loss by learning rate, momentum {momentum:g}"
    return Table(title, ("scheme", *map(str, TRIED)), tuple(rows))


def median(courses: Courses) -> tuple[float, float, float]:
    """Return updates per second, updates to the loss and seconds to the loss."""
    columns = ("rate", "updates_needed", "seconds_needed")
    rate, updates, seconds = (statistics.median(getattr(c, column) for c in courses) for column in columns)
    return rate, updates, seconds


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"


def run_all(trials: Iterable[Trial]) -> dict[Trial, Courses]:
    """Run trials one after another."""
    found: dict[Trial, Courses] = {}
    with tempfile.TemporaryDirectory(prefix="hetctl-coordination-", dir="/tmp") as name:
        for number, trial in enumerate(trials):
            folder = Path(name) / str(number)
            folder.mkdir()
            run = _submit if trial.scheme in MODES else _serve
            run(folder, trial)
            gradients = WORKERS if trial.scheme in MODES else 1
            found[trial] = [course_of(Path(c["out"]), gradients) for c in trial.configs(folder)]
    return found


def course_of(path: Path, gradients: int) -> Course:
    """Read the lines of a log, one for each epoch."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    began = lines[0][0]
    times, losses = zip(*(point for _, points in lines for point in points), strict=True)
    return Course(tuple(time - began for time in times), losses, gradients)


def _submit(folder: Path, trial: Trial) -> None:
    stop = {"metric": "val_loss", "target": TARGET, "patience": 999, "max_epochs": EPOCHS}
    mode, configs = MODES[trial.scheme], trial.configs(folder)
    PacedProject("pytorch", "logged_train_fn", mode, stop, configs).train(folder)


def _serve(folder: Path, trial: Trial) -> None:
    runs = [
        {"config": c, "bound": BOUNDS[trial.scheme], "batch": BATCH, "target": TARGET, "limit_s": LIMIT_S}
        for c in trial.configs(folder)
    ]
    (folder / "runs.json").write_text(json.dumps(runs))
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "ensembles"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "parameter_server.py"), str(folder / "runs.json")]
    subprocess.run(command, check=True, env=environment)


def plot(path: Path, quick: bool = False) -> None:
    """Draw the loss over updates and over time, from the first seed's weights."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for trial, courses in measured(quick).items():
        course = courses[0]
        updates = [course.gradients * (n + 1) for n in range(len(course.losses))]
        label = f"{trial.scheme.replace('`', '')}, {trial.learning_rate:g}"
        for axes, x in zip(panels, (updates, course.seconds), strict=True):
            axes.semilogy(x, course.losses, linewidth=1, label=label)
    for axes, what in zip(panels, ("updates", "seconds"), strict=True):
        axes.axhline(TARGET, color="black", linewidth=0.6, linestyle=":")
        axes.set_xlabel(what)
        axes.set_ylim(TARGET / 2, 5)
        axes.grid(which="major", linewidth=0.3)
    panels[0].set_ylabel("validation loss")
    panels[0].legend(fontsize=7, frameon=False)
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the comparison, or the times by learning rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--plot", action="store_true", help="draw the losses, too")
    parser.add_argument("--rates", type=float, metavar="MOMENTUM", help="try learning rates instead")
    wishes = parser.parse_args()
    if wishes.rates is not None:
        print(rates(wishes.rates))
        return
    print(table(wishes.quick))
    if wishes.plot:
        plot(IMAGE, wishes.quick)


if __name__ == "__main__":
    main()
