"""Capes et al., section 7: a cluster of 64 GPUs under three arrival rates (Tables 2 and 3).

Run it to see Table 3 as simulated here, beside the paper's::

    python tests/benchmarks/capes.py [PLANNER ..] [--seeds N]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import MEAN_JCT, Options
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

MINUTES = {1: 368, 2: 232, 4: 126, 8: 84}
"""Table 2: a job's minutes to convergence by GPUs."""

EPOCHS = {4: 160, 8: 170}
"""Table 2: epochs of these minutes."""

RESCALED = {51: (171, 104), 102: (162, 113)}
"""Table 2: epochs on 4 GPUs before a job continues on 8, with its epochs in all and its minutes."""

EPOCH = 50_000
"""Images of CIFAR-10."""

SAMPLES = 8_000_000.0
"""160 epochs of 50,000 images; nothing here depends on it."""

RESTART_S = 10.0
CLUSTER = Cluster.of(64, 8)

CONTENTION = {"extreme": (250.0, 206), "moderate": (500.0, 114), "none": (1000.0, 44)}
"""Columns of Table 3: mean seconds between arrivals, and jobs."""

PAPER: dict[str, tuple[float, float, float]] = {
    "doubling": (7.63, 2.63, 1.40),
    "doubling-exploratory-each": (20.42, 2.92, 1.47),
    "fixed-8": (22.76, 6.20, 1.40),
    "fixed-4": (12.90, 3.50, 2.21),
    "fixed-2": (11.49, 4.58, 3.78),
    "fixed-1": (10.10, 6.32, 6.37),
}
"""Table 3: mean hours from a job's arrival to its end, by column."""

STRATEGIES = (*PAPER, "doubling-exploratory")


@dataclass(frozen=True)
class Row:
    """A strategy's mean hours from arrival to completion, by column and seed."""

    strategy: str
    hours: Mapping[str, tuple[float, ...]]

    @property
    def means(self) -> dict[str, float]:
        """Hours by column, over all seeds."""
        return {column: sum(hours) / len(hours) for column, hours in self.hours.items()}


def rates() -> dict[int, float]:
    """Return samples/s on 1 to 8 GPUs; between powers of two a job is as fast as on the next lower one."""
    return {gpus: SAMPLES / (60 * MINUTES[1 << (gpus.bit_length() - 1)]) for gpus in range(1, 9)}


def arrivals(mean_s: float, jobs: int, seed: int) -> list[Arrival]:
    """Return jobs of Table 2's work with exponential gaps between them, the first after one gap too."""
    gaps = random.Random(seed)
    curve, at_s, arriving = rates(), 0.0, []
    for number in range(jobs):
        at_s += gaps.expovariate(1 / mean_s)
        job = Workload(f"job-{number:03}", curve, SAMPLES, restart_s=RESTART_S, family="resnet-110")
        arriving.append(Arrival(job, at_s))
    return arriving


def rescaled(stop: int) -> tuple[float, int]:
    """Return minutes and restarts of a job whose 4 GPUs become 8 after so many epochs (Table 2).

    A second job holds the other 4 GPUs of a node until then; `doubling` gives them to the first.
    """
    rate = {gpus: epochs * EPOCH / (60 * MINUTES[gpus]) for gpus, epochs in EPOCHS.items()}
    curve = {1: rate[4] / 4, 2: rate[4] / 2, **rate}
    total, _ = RESCALED[stop]
    jobs = [
        Workload("resized", curve, total * EPOCH, restart_s=RESTART_S),
        Workload("other", {gpus: curve[gpus] for gpus in (1, 2, 4)}, stop * EPOCH, restart_s=RESTART_S),
    ]
    planner = planner_named("doubling")
    found = simulate(
        planner, [Arrival(job) for job in jobs], Scenario(Cluster.of(8, 8)), Options(objective=MEAN_JCT)
    )
    (done_s,) = (member.done_s for member in found.members if member.member == "resized")
    return done_s / 60, found.restarts


def run(strategy: str, column: str, seed: int) -> Simulation:
    """Simulate one strategy, a planner's name with ``-each`` after it for that way to explore."""
    mean_s, jobs = CONTENTION[column]
    exploration = "each" if strategy.endswith("-each") else "shared"
    options = Options(objective=MEAN_JCT, seed=seed, exploration=exploration)
    planner = planner_named(strategy.removesuffix("-each"))
    return simulate(planner, arrivals(mean_s, jobs, seed), Scenario(CLUSTER), options)


def table3(strategies: Iterable[str] = STRATEGIES, seeds: Sequence[int] = range(10)) -> list[Row]:
    """Return a row for each strategy."""
    return [
        Row(
            strategy,
            {c: tuple(run(strategy, c, seed).mean_jct_s / 3600 for seed in seeds) for c in CONTENTION},
        )
        for strategy in strategies
    ]


def main() -> None:
    """Print hours by strategy and column, the paper's in brackets."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("strategies", nargs="*", default=STRATEGIES)
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    print(f"{'':26}" + "".join(f"{column:>17}" for column in CONTENTION))
    for strategy in arguments.strategies:
        began = time.perf_counter()
        (row,) = table3([strategy], range(arguments.seeds))
        paper = PAPER.get(strategy, ())
        cells = [f"{hours:8.2f}" for hours in row.means.values()]
        cells = [f"{cell} {f'({paper[i]:.2f})' if paper else '':8}" for i, cell in enumerate(cells)]
        print(f"{strategy:26}{''.join(cells)}  {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
