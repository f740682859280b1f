"""Hops during the outage of a worker: new plans, kept plans, and CEREBRO's draws.

python tests/benchmarks/outage_bench.py
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cerebro_bench
import numpy as np
from tables import Figure, Table

from hetctl.methods.hopper import SCHEDULERS, SearchOptions
from hetctl.methods.hopper.schedule import UnitTimes, lower_bound, visits_of
from hetctl.methods.hopper.simulate import Outage, simulate_hops

CONFIGS, WORKERS = 12, 6
SEEDS, DRAWS = 10, 10
"""Of each setting, and of `randomized` for each of them, whose mean counts."""
FIRST = SearchOptions(seconds=0.9)
"""Of the plan before the run; what is planned on the way has 0.2 s of it."""
LATE, MIDDLE, GONE = (0.0, 0.4), (0.2, 0.6), (0.2, float("inf"))
"""Start and end of the outage, in shares of the bound without an outage."""
NOTE = f"""
{CONFIGS} configurations on {WORKERS} workers; makespans to the bound without the outage, means of
{{seeds}} seeds, the workers in turn. `bound`: the larger of that bound and, without copies, of
the worker's load with its absence. `plan kept`: the plan of `best` without rescheduling. `randomized` is
the mean of {DRAWS} draws each, and `worst` the largest ratio of a seed. In one epoch without copies the
makespan is mostly what the worker has left when it returns, so it depends on chance: the
work that the failure undoes.
"""


def even(seed: int) -> UnitTimes:
    """Return units of 1 to 100 s."""
    return UnitTimes.from_matrix(np.random.default_rng(seed).uniform(1, 100, (CONFIGS, WORKERS)))


def networks(seed: int) -> UnitTimes:
    """Return units of CEREBRO's networks on its GPUs."""
    return cerebro_bench.drawn("heterogeneous", CONFIGS, WORKERS, seed)


def copied(seed: int) -> UnitTimes:
    """Return units of 1 to 100 s with each partition on two workers."""
    units = even(seed)
    seconds = units.seconds.copy()
    for partition in range(WORKERS):
        seconds[:, partition, (partition + 1) % WORKERS] = units.matrix[:, partition]
    return UnitTimes(units.configs, units.partitions, units.workers, seconds)


@dataclass(frozen=True)
class Setting:
    """Units by seed, epochs, and the outage of a worker."""

    name: str
    units: Callable[[int], UnitTimes]
    epochs: int
    outage: tuple[float, float]


REPORTED = Setting("1 to 100 s, 20 to 60 %", even, 5, MIDDLE)
SETTINGS = (
    Setting("1 to 100 s, 20 to 60 %", even, 1, MIDDLE),
    Setting("1 to 100 s, 20 to 60 %", even, 2, MIDDLE),
    REPORTED,
    Setting("1 to 100 s, joins at 40 %", even, 5, LATE),
    Setting("networks, 20 to 60 %", networks, 5, MIDDLE),
    Setting("two copies, 20 to 60 %", copied, 5, MIDDLE),
    Setting("two copies, fails at 20 %", copied, 5, GONE),
)


@dataclass(frozen=True)
class Run:
    """Makespans to the bound without an outage, and the bound with it, of one seed."""

    bound: float
    randomized: float
    kept: float
    best: float


def run(setting: Setting, seed: int) -> Run:
    """Run each planner during the outage of the worker of a seed."""
    units, epochs = setting.units(seed), setting.epochs
    whole_s = epochs * lower_bound(units)
    outage = Outage(units.workers[seed % WORKERS], *(share * whole_s for share in setting.outage))
    plan = visits_of(SCHEDULERS["best"](units, FIRST), units, epochs)

    def makespan(**how: object) -> float:
        return simulate_hops(units, epochs=epochs, outages=[outage], **how).makespan_s / whole_s

    return Run(
        bound=bound(units, epochs, outage) / whole_s,
        randomized=statistics.mean(makespan(seed=DRAWS * seed + draw) for draw in range(DRAWS)),
        kept=makespan(plan=plan, seed=seed),
        best=makespan(plan=plan, seed=seed, reschedule=FIRST),
    )


def bound(units: UnitTimes, epochs: int, outage: Outage) -> float:
    """Return the bound without the outage, or the load of the worker and its absence if these are more."""
    whole_s = epochs * lower_bound(units)
    if not units.is_open_shop:
        return whole_s
    partition = int(np.flatnonzero(units.homes == units.workers.index(outage.worker))[0])
    load_s = epochs * float(units.matrix[:, partition].sum())
    return max(whole_s, load_s + outage.end_s - outage.start_s) if load_s > outage.start_s else whole_s


def table(quick: bool = False) -> Table:
    """Return all settings; two seeds if quick."""
    seeds = range(2 if quick else SEEDS)
    runs = {setting: [run(setting, seed) for seed in seeds] for setting in SETTINGS}
    several = [over(some) for setting, some in runs.items() if setting.epochs > 1]
    return Table(
        title="Hopper: outage of a worker",
        header=(
            "units, outage",
            "epochs",
            "bound",
            "randomized",
            "plan kept",
            "best",
            "to randomized",
            "worst",
        ),
        rows=tuple(row(setting, some) for setting, some in runs.items()),
        figures=(
            Figure("`best` to `randomized`, 5 epochs, 20 to 60 %", over(runs[REPORTED]), 1.0),
            Figure("`best` to `randomized`, worst of several epochs", max(several), 1.0),
        ),
        note=" ".join(NOTE.split()).format(seeds=len(seeds)),
    )


def over(runs: Sequence[Run]) -> float:
    """Return the mean of `best` over that of `randomized`."""
    return statistics.mean(one.best for one in runs) / statistics.mean(one.randomized for one in runs)


def row(setting: Setting, runs: Sequence[Run]) -> tuple[str, ...]:
    """Set out the seeds of a setting."""
    means = [
        statistics.mean(getattr(one, name) for one in runs)
        for name in ("bound", "randomized", "kept", "best")
    ]
    worst = max(one.best / one.randomized for one in runs)
    return (
        setting.name,
        str(setting.epochs),
        *(f"{mean:.3f}" for mean in means),
        f"{over(runs):.3f}",
        f"{worst:.3f}",
    )


def main() -> int:
    """Print the table."""
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
