"""CEREBRO's comparison of schedulers, replayed (Figures 5 and 15).

    python tests/benchmarks/cerebro_bench.py

Costs of an image are those of the 35 networks that albanie/convnet-burden (MIT) lists for image
classification, in MFLOPs: from 360 to 21,000 with a mean of 5,942, where the paper has 36 with 5,939.
Numbers of configurations and of workers are hetctl's, as the figures' are not in the text; the paper gives
its MILP five minutes of Gurobi, this gives HiGHS seconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from tables import Figure, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from hop_rules import broken_by_schedule

from hetctl.methods.hopper import SCHEDULERS, SearchOptions
from hetctl.methods.hopper.milp import MOST_PAIRS
from hetctl.methods.hopper.schedule import UnitTimes, lower_bound

COSTS = (
    *(727, 724, 837, 360, 727, 2000, 3000, 2000, 2000, 2000, 16000, 16000, 20000, 2000, 2000, 4000, 4000),
    *(8000, 11000, 4000, 8000, 16000, 6000, 4000, 8000, 11000, 4000, 8000, 21000, 2000, 3000, 8000, 3000),
    *(4000, 579),
)
CAPACITIES = (12.1, 5.6, 11.3, 18.7)
"""TFLOPs/s of Titan Xp, K80, GTX 1080 and P100."""
IMAGES = 1_200_000
"""Of ImageNet, in as many partitions as there are workers."""
CONFIGS, WORKERS = (16, 64, 256), (8, 16)
SETTINGS = {
    "homogeneous": (False, False),
    "homogeneous workers": (True, False),
    "heterogeneous": (True, True),
}
"""Whether configurations differ, and workers."""
SEEDS, SECONDS = 5, 2.0
OTHERS = ("approximate", "best")
MILP_SIZES, MILP_SECONDS, MILP_SEEDS = ((4, 4), (4, 8), (8, 8), (8, 16)), (2.0, 10.0, 30.0), 3
"""Workers and configurations, and time limits, with which `milp` is tried; with more it finds nothing."""


@dataclass(frozen=True)
class Run:
    """One drawing of configurations and workers: makespans to that of `randomized`, and planning times."""

    setting: str
    configs: int
    workers: int
    ratios: dict[str, float]
    took_s: dict[str, float]
    bound: float


def drawn(setting: str, configs: int, workers: int, seed: int) -> UnitTimes:
    """Return unit times of one epoch."""
    configs_differ, workers_differ = SETTINGS[setting]
    draw = np.random.default_rng(seed)
    costs = draw.choice(COSTS, configs) if configs_differ else np.full(configs, statistics.mean(COSTS))
    speeds = draw.choice(CAPACITIES, workers) if workers_differ else np.full(workers, CAPACITIES[-1])
    return UnitTimes.from_matrix(costs[:, None] * 1e6 * IMAGES / workers / (speeds * 1e12))


def run(setting: str, configs: int, workers: int, seed: int, seconds: float) -> Run:
    """Let every scheduler plan one drawing."""
    units = drawn(setting, configs, workers, seed)
    makespans, took_s = {}, {}
    for name in ("randomized", *OTHERS):
        began_s = time.perf_counter()
        schedule = SCHEDULERS[name](units, SearchOptions(seed=seed, seconds=seconds))
        took_s[name] = time.perf_counter() - began_s
        makespans[name] = schedule.makespan_s
        assert not broken_by_schedule(schedule, units)
    base_s = makespans["randomized"]
    ratios = {name: makespan_s / base_s for name, makespan_s in makespans.items()}
    return Run(setting, configs, workers, ratios, took_s, lower_bound(units) / base_s)


def table(quick: bool = False) -> Table:
    """Return the figures' panels, one row for each number of workers and of configurations."""
    seeds, seconds = (range(2), 0.5) if quick else (range(SEEDS), SECONDS)
    sizes = list(product(SETTINGS, WORKERS, CONFIGS[: 2 if quick else None]))
    runs = {(s, p, n): [run(s, n, p, seed, seconds) for seed in seeds] for s, p, n in sizes}
    every = [one for some in runs.values() for one in some]
    return Table(
        title="Hopper: CEREBRO's Figures 5 and 15",
        header=("setting, workers x configurations", *OTHERS, "bound", "s: randomized", *OTHERS),
        rows=tuple(row(f"{s}, {p} x {n}", runs[s, p, n]) for s, p, n in sizes),
        figures=(
            Figure("`best` to `randomized`, worst", max(one.ratios["best"] for one in every), 1.0),
            Figure("`best` to the shortest of the others, worst", max(map(behind, every)), 1.0),
        ),
        note=f"Makespans to that of `randomized` (mean, least and most of {len(seeds)} seeds), and mean"
        f" seconds of planning; `best` has {seconds:g} s. Assumed: costs of an image from a public list of 35"
        " networks (the paper does not name its 36), TFLOPs/s of four GPUs, numbers of configurations and"
        " workers (the figures are pictures), and hops that take no time. The paper's third scheduler, its"
        " MILP, is in the next table.",
    )


def milp_table(quick: bool = False) -> Table:
    """Return what `milp` finds within several time limits, where it finds anything."""
    limits, seeds = (MILP_SECONDS[:1], range(1)) if quick else (MILP_SECONDS, range(MILP_SEEDS))
    rows = []
    for workers, configs in MILP_SIZES:
        shops = [drawn("heterogeneous", configs, workers, seed) for seed in seeds]
        bases = [
            SCHEDULERS["randomized"](shop, SearchOptions(seed=k)).makespan_s for k, shop in enumerate(shops)
        ]
        tried = [("milp", limit) for limit in limits] + [(name, limits[0]) for name in OTHERS]
        found = [
            [
                SCHEDULERS[name](shop, SearchOptions(seed=k, seconds=limit)).makespan_s / bases[k]
                for k, shop in enumerate(shops)
            ]
            for name, limit in tried
        ]
        found.append([lower_bound(shop) / base for shop, base in zip(shops, bases, strict=True)])
        rows.append((f"{workers} x {configs}", *map(spread, found)))
    return Table(
        title="Hopper: CEREBRO's MILP under time limits",
        header=("workers x configurations", *(f"milp, {limit:g} s" for limit in limits), *OTHERS, "bound"),
        rows=tuple(rows),
        note="Configurations and workers differ. Makespans to that of `randomized`, with which `milp` begins:"
        f" mean, least and most of {len(seeds)} seeds. `best` has {limits[0]:g} s. The paper gives Gurobi"
        " five minutes for this programme; here it is HiGHS. Programmes of more than"
        f" {MOST_PAIRS} pairs of units are not tried.",
    )


def behind(one: Run) -> float:
    """Return our makespan to the least of the paper's schedulers."""
    return one.ratios["best"] / min(ratio for name, ratio in one.ratios.items() if name != "best")


def row(name: str, runs: Sequence[Run]) -> tuple[str, ...]:
    """Set out the drawings of one size."""
    seconds = [f"{statistics.mean(one.took_s[name] for one in runs):.3f}" for name in ("randomized", *OTHERS)]
    bound = f"{statistics.mean(one.bound for one in runs):.3f}"
    return (name, *(spread([one.ratios[name] for one in runs]) for name in OTHERS), bound, *seconds)


def spread(values: Sequence[float]) -> str:
    """Return the mean with the least and the most."""
    return f"{statistics.mean(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def main() -> int:
    """Print the table."""
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
