"""Distance of the hopper's schedulers from the bound: Taillard's open shops, and 500 x 64.

python tests/benchmarks/hopper_bench.py [DATA_FOLDER]      (or HETCTL_DATA)
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tables import Figure, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from hop_rules import broken_by_schedule

from hetctl.methods.hopper import SCHEDULERS, SearchOptions
from hetctl.methods.hopper.list_schedule import Residual, dense
from hetctl.methods.hopper.portfolio import refine
from hetctl.methods.hopper.schedule import Schedule, UnitTimes, lower_bound

SIZES = (4, 5, 7, 10, 15, 20)
SMALL = (4, 5)
"""Sizes whose optimum is proved, as it is often above the bound."""
PROOF_SECONDS = 60.0
MAY_TAKE_S, LARGE_MAY_TAKE_S = 1.0, 5.0
MARGIN = 0.9
"""Share of the time that may be taken which the scheduler is told of."""
DRAWS = 10
"""Of `randomized`, whose mean counts."""
LARGE = (500, 64)
REPLICATED = (200, 32, 3)
"""Configurations, workers and partitions, and workers that have each partition."""


@dataclass(frozen=True)
class Case:
    """One instance: what was found for it in how many seconds.

    Parameters
    ----------
    optimum_s : float
        Of a small instance; the bound of others.
    randomized, approximate : float
        Makespans to the bound.
    """

    size: int
    optimum_s: float
    randomized: float
    approximate: float
    best_s: float
    took_s: float

    @property
    def ratio(self) -> float:
        return self.best_s / self.optimum_s


def instances(folder: Path, size: int) -> list[UnitTimes]:
    """Read Taillard's instances: a line with the sizes, then a matrix."""
    files = sorted((folder / "taillard-openshop").glob(f"ta{size}x{size}_*os.txt"))
    return [UnitTimes.from_matrix(np.loadtxt(file, skiprows=1)) for file in files]


def scheduled(name: str, units: UnitTimes, seconds: float, seed: int = 0) -> tuple[Schedule, float]:
    """Return the schedule and the seconds that it took."""
    began_s = time.perf_counter()
    schedule = SCHEDULERS[name](units, SearchOptions(seed=seed, seconds=seconds))
    took_s = time.perf_counter() - began_s
    assert not broken_by_schedule(schedule, units)
    return schedule, took_s


def optimum(units: UnitTimes) -> float:
    """Return the optimum of a small open shop, which the solver proves in much less than its time."""
    began_s = time.perf_counter()
    found = refine(
        units, dense(Residual.whole(units)), lower_bound(units), SearchOptions(seconds=PROOF_SECONDS)
    )
    assert time.perf_counter() - began_s < PROOF_SECONDS, "the optimum was not proved"
    return found.makespan_s


def case(units: UnitTimes) -> Case:
    """Measure one instance."""
    size = len(units.configs)
    bound_s = lower_bound(units)
    draws = [scheduled("randomized", units, 0.0, seed)[0].makespan_s for seed in range(DRAWS)]
    best, took_s = scheduled("best", units, MARGIN * MAY_TAKE_S)
    return Case(
        size=size,
        optimum_s=optimum(units) if size in SMALL else bound_s,
        randomized=statistics.mean(draws) / bound_s,
        approximate=scheduled("approximate", units, 0.0)[0].makespan_s / bound_s,
        best_s=best.makespan_s,
        took_s=took_s,
    )


def table(quick: bool = False) -> Table:
    """Return Taillard's instances by size; three of each if quick."""
    folder = os.environ.get("HETCTL_DATA")
    found = {size: instances(Path(folder), size) if folder else [] for size in SIZES}
    if not all(found.values()):
        return Table(
            "Open shops", (), (), note="Skipped: HETCTL_DATA names no folder with taillard-openshop."
        )
    scheduled("best", found[SIZES[0]][0], 0.1)
    cases = [case(units) for size in SIZES for units in found[size][: 3 if quick else None]]
    large, took_s = scheduled("best", large_shop(), MARGIN * LARGE_MAY_TAKE_S)
    replicas, _ = scheduled("best", replicated(), MARGIN * LARGE_MAY_TAKE_S)
    return Table(
        title="Hopper: Taillard's open shops",
        header=("size", "randomized", "approximate", "best", "median", "worst", "slowest"),
        rows=tuple(row(size, [c for c in cases if c.size == size]) for size in SIZES),
        figures=(
            Figure("`best` to the bound, median, 7x7 and up", median_of_large(cases), 1.01),
            Figure("`best` to the optimum, worst, 4x4 and 5x5", worst_of_small(cases), 1.005),
            Figure("`best`, longest search, s", max(c.took_s for c in cases), MAY_TAKE_S),
            Figure("500 configurations x 64 workers, s", took_s, LARGE_MAY_TAKE_S),
            Figure("500 x 64 to the bound", large.makespan_s / lower_bound(large_shop()), 1.01),
            Figure(
                "200 x 32 with 3 replicas to the bound", replicas.makespan_s / lower_bound(replicated()), 1.01
            ),
        ),
        note="Makespans to the larger of row and column bound, those of `best` for 4x4 and 5x5 to the proved"
        " optimum: means over the instances, and the median of `best`. `randomized` is the mean of"
        f" {DRAWS} draws each.",
    )


def row(size: int, cases: Sequence[Case]) -> tuple[str, ...]:
    """Set out the instances of a size."""
    ratios = [c.ratio for c in cases]
    return (
        f"{size}x{size}",
        f"{statistics.mean(c.randomized for c in cases):.3f}",
        f"{statistics.mean(c.approximate for c in cases):.3f}",
        f"{statistics.mean(ratios):.4f}",
        f"{statistics.median(ratios):.4f}",
        f"{max(ratios):.4f}",
        f"{max(c.took_s for c in cases):.2f} s",
    )


def median_of_large(cases: Sequence[Case]) -> float:
    """Return the largest of the sizes' medians."""
    large = [size for size in SIZES if size not in SMALL]
    return max(statistics.median(c.ratio for c in cases if c.size == size) for size in large)


def worst_of_small(cases: Sequence[Case]) -> float:
    """Return the worst ratio to an optimum."""
    return max(c.ratio for c in cases if c.size in SMALL)


def large_shop() -> UnitTimes:
    """Return configurations of unlike costs on workers of unlike speed."""
    draw = np.random.default_rng(0)
    costs, speeds = draw.uniform(0.36, 21, LARGE[0]), draw.choice([12.1, 5.6, 11.3, 18.7], LARGE[1])
    return UnitTimes.from_matrix(costs[:, None] / speeds * draw.uniform(0.9, 1.1, LARGE))


def replicated() -> UnitTimes:
    """Return such configurations with partitions on workers that are drawn."""
    configs, workers, copies = REPLICATED
    draw = np.random.default_rng(0)
    costs, speeds = draw.uniform(0.36, 21, configs), draw.choice([12.1, 5.6, 11.3, 18.7], workers)
    seconds = np.full((configs, workers, workers), np.inf)
    for partition in range(workers):
        at = draw.choice(workers, copies, replace=False)
        seconds[:, partition, at] = costs[:, None] / speeds[at]
    names = [
        tuple(f"{kind}{i}" for i in range(size)) for kind, size in zip("cpw", seconds.shape, strict=True)
    ]
    return UnitTimes(*names, seconds)


def main() -> int:
    """Print the table."""
    if len(sys.argv) > 1:
        os.environ["HETCTL_DATA"] = sys.argv[1]
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
