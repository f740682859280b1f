"""Time of a decision by planner, as members and GPUs grow tenfold together.

Run it to see the table; a log-log plot is saved where ``--plot`` says, by default in the
documentation's images::

    python tests/benchmarks/planning_time.py [PLANNER ..] [--largest N] [--plot [FILE]]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from replays.rival_planners import PLANNERS, planner_named

from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Options, Request

SIZES = ((10, 16), (100, 160), (1000, 1600), (1000, 10_000), (10_000, 100_000))
"""Members and GPUs; the issue asks for 10 ms on the second, and 10 s on the last."""
GPUS_PER_NODE = 4
PEAK = 64
"""The most GPUs on which a member's rate is known."""
REPEATS = 3
IMAGE = Path(__file__).parents[2] / "docs" / "images" / "planning-time.svg"


@dataclass(frozen=True)
class Row:
    """Processor time of a first decision, where nobody trains yet; the best of a few."""

    members: int
    gpus: int
    planner: str
    milliseconds: float


def ensemble(count: int, seed: int = 0) -> tuple[Workload, ...]:
    """Draw members as in FLEET's evaluation: 21 to 176 images/s, scaling sublinearly."""
    draw = random.Random(seed)
    members = []
    for number in range(count):
        single, power = 21 * (176 / 21) ** draw.random(), draw.uniform(0.8, 0.95)
        rates = {gpus: single * gpus**power for gpus in range(1, PEAK + 1)}
        members.append(Workload(f"m{number}", rates, 30_000.0 * draw.randint(10, 40), 30_000, restart_s=10.0))
    return tuple(members)


def rows(
    names: Sequence[str], sizes: Sequence[tuple[int, int]] = SIZES, options: Options | None = None
) -> Iterator[Row]:
    """Yield what was measured, size by size."""
    for count, gpus in sizes:
        members, nodes = ensemble(count), Cluster.of(gpus, GPUS_PER_NODE).nodes
        request = Request(members, nodes, gpus, 0, options or Options(), cluster=nodes)
        for name in names:
            yield Row(count, gpus, name, 1000 * _seconds(name, request))


def _seconds(name: str, request: Request) -> float:
    planner = planner_named(name)
    taken: list[float] = []
    while len(taken) < REPEATS and sum(taken) < 1.0:
        began = time.process_time()
        planner.decide(request)
        taken.append(time.process_time() - began)
    return min(taken)


def table(found: Sequence[Row]) -> str:
    """Return the rows as text, a column for each size."""
    sizes = list(dict.fromkeys((row.members, row.gpus) for row in found))
    cells = {(row.planner, row.members, row.gpus): f"{row.milliseconds:,.1f}" for row in found}
    lines = [["ms a decision", *(f"{members:,} on {gpus:,}" for members, gpus in sizes)]]
    for name in dict.fromkeys(row.planner for row in found):
        lines.append([name, *(cells.get((name, *size), "") for size in sizes)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines
    )


def plot(found: Sequence[Row], path: Path) -> None:
    """Save time over members, both on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row.planner for row in found):
        points = sorted((row.gpus, row.milliseconds) for row in found if row.planner == name)
        axes.loglog(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=name)
    ends = [row for row in found if row.gpus in (min(r.gpus for r in found), max(r.gpus for r in found))]
    low, high = min(row.gpus for row in ends), max(row.gpus for row in ends)
    start = min(row.milliseconds for row in ends if row.gpus == low)
    axes.loglog([low, high], [start, start * high / low], "k:", linewidth=1, label="linear")
    axes.set_xlabel("GPUs of the cluster")
    axes.set_ylabel("milliseconds a decision")
    axes.grid(which="major", linewidth=0.3)
    axes.legend(fontsize=8, frameon=False, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, print, and plot if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("planners", nargs="*", default=[*PLANNERS, "fixed-4"])
    parser.add_argument("--largest", type=int, default=SIZES[-1][1], help="GPUs of the largest cluster")
    parser.add_argument("--plot", type=Path, nargs="?", const=IMAGE, help="where to save the plot")
    wishes = parser.parse_args()
    found = list(rows(wishes.planners, [size for size in SIZES if size[1] <= wishes.largest]))
    print(table(found))
    if wishes.plot:
        plot(found, wishes.plot)
        print(f"wrote {wishes.plot}")


if __name__ == "__main__":
    main()
