"""LB-BSP's Table 3 replayed: errors and cost of predictors of speed on workers that share their machines.

The shared cluster is that of LB-BSP's Table 2, 32 workers. What else runs on a worker's machine follows one
of the three series of CPU utilisation (`nab`) from a place drawn at random, and its memory follows another.
How those slow a worker down is assumed, and so is the noise: the constants below. Samples of the series
are five minutes apart; here each lasts a few iterations, and how many matters, so there are three paces.

    python tests/benchmarks/predictor_bench.py [--quick]      (HETCTL_DATA names the folder with `nab`)
"""

from __future__ import annotations

import csv
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tables import Figure, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from replays.speed_predictors import PREDICTORS

from hetctl.methods.balance.manager import Observation
from hetctl.methods.balance.managers import CpuManager
from hetctl.methods.balance.predictors.learner import Learner, Predictor
from hetctl.methods.balance.step_time import Values

ALONE = {"m4.2xlarge": (17, 100.0), "c5.2xlarge": (10, 125.0), "r4.2xlarge": (2, 100.0)} | {
    "m4.4xlarge": (2, 200.0),
    "m4.xlarge": (1, 50.0),
}
"""Workers of each kind (Table 2), and samples/s that one takes alone: by its cores, those of c5 faster."""
TAKEN = 0.8
"""Share of a machine that the others have at full utilisation."""
MEMORY_OWN, MEMORY_OTHERS, MEMORY_FREE, SWAPPING = 0.3, 0.65, 0.75, 2.0
"""Memory in use: a worker's own, and by others at full utilisation; above a level, speed falls so steeply."""
JITTER, HICCUPS, HICCUP, MEASURING = 0.05, 0.02, 0.6, 0.01
"""Lognormal noise of the speed, share of iterations that something transient slows down to a factor,
and what is wrong with measured CPU and memory."""

PAPER = {
    "memoryless": (11.85, 0.58),
    "ema": (7.85, 0.48),
    "arima": (9.67, 0.52),
    "rnn": (8.34, 0.49),
    "lstm": (9.19, 0.51),
    "narx": (4.78, 0.42),
}
"""RMSE and iteration time over BSP's as LB-BSP's Table 3 has them, for its own cluster."""

BATCH = 128
FIRST = 500
"""Iterations that are not counted: before them, no predictor has its network (section 4)."""
PACES = (1, 10, 60)
MANY = 96
TOLD = "narx, told ahead"
LIMITS = (TOLD, "known")
"""Rows that no predictor can reach: they know something of the iteration that they predict."""

Row = tuple[float, float]


@dataclass(frozen=True)
class Trace:
    """What happens to each worker, arrays of the shape (iterations, workers)."""

    speed: Values
    cpu: Values
    memory: Values


def load(folder: Path) -> list[Values]:
    """Return the series of utilisation, from 0 to 1."""
    found = []
    for file in sorted((folder / "nab").glob("*.csv")):
        with file.open(newline="") as lines:
            found.append(np.array([float(row["value"]) for row in csv.DictReader(lines)]) / 100)
    return found


def trace(series: Sequence[Values], pace: int, iterations: int, seed: int) -> Trace:
    """Draw what happens; each sample of a series lasts `pace` iterations."""
    draw = np.random.default_rng(seed)
    alone = np.array([speed for count, speed in ALONE.values() for _ in range(count)])
    shape = (iterations, len(alone))

    def followed(first: int) -> Values:
        columns = [series[(first + worker) % len(series)] for worker in range(len(alone))]
        starts = [draw.integers(len(column) * pace) for column in columns]
        at = np.arange(iterations)
        return np.stack(
            [c[(start + at) // pace % len(c)] for c, start in zip(columns, starts, strict=True)], axis=1
        )

    cpu = 1 - TAKEN * followed(0)
    memory = MEMORY_OWN + MEMORY_OTHERS * followed(1)
    swapping = 1 - SWAPPING * np.maximum(memory - MEMORY_FREE, 0)
    noise = draw.lognormal(0.0, JITTER, shape) * np.where(draw.random(shape) < HICCUPS, HICCUP, 1.0)
    wrong = draw.normal(0.0, MEASURING, (2, *shape))
    return Trace(alone * cpu * swapping * noise, cpu + wrong[0], memory + wrong[1])


class Recorded:
    """A predictor whose predictions are kept."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self.predictions: list[Values] = []

    def observe(self, speed: Values, cpu: Values, memory: Values) -> None:
        self._predictor.observe(speed, cpu, memory)

    def predict(self) -> Values:
        self.predictions.append(self._predictor.predict())
        return self.predictions[-1]


class Known:
    """Predicts what is going to happen: the limit of all predictors."""

    def __init__(self, happening: Trace) -> None:
        self._speeds = iter(happening.speed[1:])

    def observe(self, speed: Values, cpu: Values, memory: Values) -> None:
        pass

    def predict(self) -> Values:
        return next(self._speeds)


def replayed(happening: Trace, predictor: Predictor, told_ahead: int = 0) -> Row:
    """Return the RMSE in samples/s, its mean over workers, and the iteration time over BSP's.

    Before iteration k, CPU and memory are those of iteration k - 1, like its speed: nothing else can be
    measured by then. With `told_ahead` they are of so many iterations later.
    """
    recorded = Recorded(predictor)
    batches = (BATCH,) * happening.speed.shape[1]
    manager = CpuManager(batches, recorded)
    seconds = []
    for k in range(1, len(happening.speed)):
        took = np.array(batches) / happening.speed[k - 1]
        use = k - 1 + told_ahead
        seen = zip(batches, took, happening.cpu[use], happening.memory[use], strict=True)
        batches = manager.update([Observation(*values) for values in seen])
        if isinstance(predictor, Learner):
            predictor.train()
        seconds.append(max(batches / happening.speed[k]))
    actual = happening.speed[1 + FIRST :]
    wrong = np.array(recorded.predictions[FIRST:]) - actual
    rmse = float(np.sqrt((wrong**2).mean(axis=0)).mean())
    return rmse, statistics.fmean(seconds[FIRST:]) / float((BATCH / actual).max(axis=1).mean())


def update_ms(name: str, updates: int) -> Row:
    """Return the milliseconds of an update for 96 workers: median, and 99th percentile.

    Networks are trained beside, as in the background of rank 0. To take over their weights counts.
    """
    draw = np.random.default_rng(0)
    predictor = PREDICTORS[name](MANY, 0)
    took = []
    for _ in range(FIRST + updates):
        cpu, memory = draw.uniform(0.2, 1.0, (2, MANY))
        speed = 100 * cpu * draw.lognormal(0.0, JITTER, MANY)
        waits = predictor.training if isinstance(predictor, Learner) else None
        trained = None if waits is None else waits.fitted()
        began = time.perf_counter()
        if trained is not None:
            predictor.adopt(trained)
        predictor.observe(speed, cpu, memory)
        predictor.predict()
        took.append(1e3 * (time.perf_counter() - began))
    counted = took[FIRST:]
    return statistics.median(counted), float(np.percentile(counted, 99))


def table(quick: bool = False) -> Table:
    """Replay Table 3 at every pace, and measure the updates."""
    paces, iterations, updates = (PACES[1:2], 1500, 200) if quick else (PACES, 4000, 1000)
    title = "LB-BSP's Table 3: RMSE in samples/s and iteration time over BSP's, by predictor of speed"
    costs = {name: update_ms(name, updates) for name in PREDICTORS}
    cheap = tuple(Figure(f"{name}, ms per update", cost[0], 1.0) for name, cost in costs.items())
    folder = os.environ.get("HETCTL_DATA")
    series = load(Path(folder)) if folder else []
    if not series:
        return Table(title, (), (), cheap, "Not replayed: HETCTL_DATA names no folder with `nab`.")
    found: dict[str, list[Row]] = {}
    for pace in paces:
        happening = trace(series, pace, iterations, seed=pace)
        for name, make in PREDICTORS.items():
            found.setdefault(name, []).append(replayed(happening, make(happening.speed.shape[1], 0)))
        ahead = PREDICTORS["narx"](happening.speed.shape[1], 0)
        found.setdefault(TOLD, []).append(replayed(happening, ahead, told_ahead=1))
        found.setdefault("known", []).append(replayed(happening, Known(happening)))
    rows = tuple((name, *_cells(name, pairs), *_ms(costs, name)) for name, pairs in found.items())
    columns = [part for pace in paces for part in (f"RMSE, {pace}", f"time, {pace}")]
    level = tuple(
        Figure(f"NARX's {what} over the least of the others, pace {pace}", _over_others(found, p, at), 1.02)
        for p, pace in enumerate(paces)
        for at, what in enumerate(("RMSE", "iteration time"))
    )
    note = (
        f"{len(series)} series drive {happening.speed.shape[1]} workers; a sample lasts as many iterations "
        f"as the header gives. Iterations {FIRST} to {iterations}. The effect of CPU and memory on speed, "
        "and its noise, are assumed; the paper's own figures are those of another cluster. Predictors know "
        f"the iterations before the one that they predict. The last two rows are limits: `{TOLD}` is given "
        "CPU and memory of that iteration itself, `known` its speeds. A network is replaced by the moving "
        "average while that has smaller errors, which is "
        f"not in the paper. Updates for {MANY} workers: median and 99th percentile, without the trainings, "
        "which are a background process's."
    )
    header = ("predictor", "RMSE, paper", "time, paper", *columns, "ms", "ms, 99 %")
    return Table(title, header, rows, (*level, *cheap), note)


def _cells(name: str, pairs: Sequence[Row]) -> tuple[str, ...]:
    paper = [f"{value:.2f}" for value in PAPER.get(name, ())] or ["", ""]
    return (*paper, *(cell for rmse, seconds in pairs for cell in (f"{rmse:.2f}", f"{seconds:.3f}")))


def _ms(costs: Mapping[str, Row], name: str) -> tuple[str, ...]:
    return tuple(f"{value:.2f}" for value in costs[name]) if name in costs else ("", "")


def _over_others(found: Mapping[str, Sequence[Row]], pace: int, at: int) -> float:
    others = [pairs[pace][at] for name, pairs in found.items() if name not in ("narx", *LIMITS)]
    return found["narx"][pace][at] / min(others)


def main() -> int:
    """Print the table; exit code 1: a bar is passed."""
    result = table("--quick" in sys.argv)
    print(result)
    return 0 if all(figure.holds for figure in result.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
