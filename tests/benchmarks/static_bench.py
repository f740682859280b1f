"""Distance of `static` from the bound of constant allotments, on rates that others measured.

Each instance has 100 members, drawn with equal chances from the rows of the tables. Their work is
lognormal with sigma 1 around one GPU-hour: exp(N(0, 1)) hours of the row's rate on one GPU. Rates
between and beyond the measured numbers of GPUs are those that the product predicts.

    python tests/benchmarks/static_bench.py [DATA_FOLDER]      (or HETCTL_DATA)
"""

from __future__ import annotations

import csv
import os
import random
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import allotment_bound, allotments_of
from hetctl.perf.rate_extrapolation import rate_curve, usable_rates
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Options
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

MEMBERS, GPUS, SIGMA = 100, 64, 1.0
NODE_SIZES = (4, 8)
SETS = ("elasticflow-a100", "gavel-p100")


@dataclass(frozen=True)
class Row:
    """One instance, planned and simulated.

    Parameters
    ----------
    one_node_s : float
        Makespan of the same members where all GPUs are in one node, so that nothing has to be packed.
    one_member : bool
        Whether the bound is the least time of one member, which a schedule attains more easily.
    first_s, later_s : float
        What the first decision took, and all others together.
    """

    data: str
    gpus_per_node: int
    seed: int
    makespan_s: float
    one_node_s: float
    bound_s: float
    one_member: bool
    first_s: float
    later_s: float

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.bound_s

    @property
    def packing(self) -> float:
        return self.makespan_s / self.one_node_s


def tables(folder: Path, data: str) -> list[dict[int, float]]:
    """Return the rates in samples/s (steps/s for the second set) by number of GPUs of every row."""
    files = sorted((folder / data).glob("*.csv")) or [folder / f"{data}.csv"]
    return [rates for file in files for rates in _rows_of(file) if rates]


def _rows_of(file: Path) -> Iterator[dict[int, float]]:
    with file.open(newline="") as lines:
        header, *rows = csv.reader(lines)
    for first, *cells in rows:
        batch = int(first) if header[0] == "global_batch_size" else 1
        points = zip(header[1:], cells, strict=False)
        yield usable_rates({int(m): float(cell) * batch for m, cell in points if cell.strip()})


def instance(rows: list[dict[int, float]], seed: int, sigma: float = SIGMA) -> list[Workload]:
    """Draw the members."""
    draw = random.Random(seed)
    members = []
    for number in range(MEMBERS):
        measured = draw.choice(rows)
        hours = draw.lognormvariate(0.0, sigma)
        rates = rate_curve(measured, GPUS).useful
        members.append(Workload(f"m{number:03}", rates, hours * 3600 * rates[1]))
    return members


def planned(
    members: list[Workload], gpus_per_node: int, seed: int, limit_s: float, planner: str = "static"
) -> Simulation:
    """Plan and simulate one instance."""
    options = Options(seed=seed, solver_time_limit_s=limit_s)
    scenario = Scenario(Cluster.of(GPUS, gpus_per_node))
    return simulate(planner_named(planner), [Arrival(member) for member in members], scenario, options)


def measured(data: str, members: list[Workload], gpus_per_node: int, seed: int, limit_s: float) -> Row:
    """Measure one instance, also without nodes."""
    result = planned(members, gpus_per_node, seed, limit_s)
    bound_s = allotment_bound([allotments_of(one, range(1, GPUS + 1)) for one in members], GPUS)
    alone_s = max(m.samples_left / max(m.rates.values()) for m in members)
    return Row(
        data=data,
        gpus_per_node=gpus_per_node,
        seed=seed,
        makespan_s=result.makespan_s,
        one_node_s=planned(members, GPUS, seed, limit_s).makespan_s,
        bound_s=bound_s,
        one_member=alone_s >= bound_s * (1 - 1e-6),
        first_s=result.slowest_plan_s,
        later_s=result.plan_seconds - result.slowest_plan_s,
    )


def rows(seeds: Iterable[int], data_folder: Path, limit_s: float = 2.0, sigma: float = SIGMA) -> list[Row]:
    """Measure every data set, node size and seed."""
    found = {data: tables(data_folder, data) for data in SETS}
    return [
        measured(data, instance(table, seed, sigma), size, seed, limit_s)
        for seed in seeds
        for data, table in found.items()
        for size in NODE_SIZES
    ]


HEADER = (
    "data               GPUs/node  median   worst  one member  median of others  packing  first s  later s"
)


def table(results: list[Row]) -> str:
    """Set the results out by data set and node size."""
    lines = [HEADER]
    for data in SETS:
        for size in NODE_SIZES:
            group = [row for row in results if (row.data, row.gpus_per_node) == (data, size)]
            ratios = [row.ratio for row in group]
            others = [row.ratio for row in group if not row.one_member]
            lines.append(
                f"{data:18} {size:9} {statistics.median(ratios):7.4f} {max(ratios):7.4f}"
                f" {len(group) - len(others):11} {statistics.median(others) if others else 1:17.4f}"
                f" {statistics.median(row.packing for row in group):8.4f}"
                f" {max(row.first_s for row in group):8.2f} {max(row.later_s for row in group):8.3f}"
            )
    return "\n".join(lines)


def main() -> int:
    """Print the table."""
    folder = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("HETCTL_DATA")
    if not folder or not all(any(Path(folder).glob(f"{data}*")) for data in SETS):
        print(f"skipped: give a folder with {' and '.join(SETS)}, or set HETCTL_DATA")
        return 0
    print(table(rows(range(20), Path(folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
