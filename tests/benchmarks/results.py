"""Write docs/results.md anew, with its pictures: ``python tests/benchmarks/results.py``.

The text between the tables is in results.md beside this file.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from string import Template

import accuracy_bench
import bench
import coordination_bench
import fleet
import matplotlib
import planning_time
import replay
import stage_accuracy_bench
from matplotlib.figure import Figure

TEXT = Path(__file__).with_suffix(".md")
DOCS = Path(__file__).parents[2] / "docs"
DRAWN = ("independent", "flotilla", "static", "fluid")


def main() -> None:
    """Measure, and write when all is there."""
    parts = (bench.PLANNING, bench.FEEDING, bench.DECIDING)
    limits, feeding, deciding = (bench.measured(sections) for sections in parts)
    page = Template(TEXT.read_text(encoding="utf-8")).substitute(
        limits="\n\n".join(map(str, limits)),
        feeding="\n\n".join(map(str, feeding)),
        deciding="\n\n".join(map(str, deciding)),
        seeds=len(replay.SEEDS),
        speedups=replay.figure5(),
        lockstep=replay.figure5(lockstep=True),
        waiting=replay.figure6(),
        seed=replay.SEEDS[0],
        spread=replay.table3(),
        totals=replay.table4(),
        checkpoint=f"{replay.CHECKPOINT_S:g}",
        scheduling=replay.scheduling(),
        rescaling=replay.rescaling(),
        hours=replay.capes3(),
        peaks=replay.peaks(),
    )
    with matplotlib.rc_context({"svg.hashsalt": "results", "svg.fonttype": "none"}):
        draw_ratios(DOCS / "images" / "ratios.svg")
        planning_time.plot(bench.plan_times(planning_time.SIZES), planning_time.IMAGE)
    accuracy_bench.plot(accuracy_bench.IMAGE)
    coordination_bench.plot(coordination_bench.IMAGE)
    stage_accuracy_bench.plot(stage_accuracy_bench.IMAGE)
    (DOCS / TEXT.name).write_text(page, encoding="utf-8")


def draw_ratios(path: Path, seeds: Sequence[int] = replay.SEEDS) -> None:
    """Draw the median makespan over the fluid bound of some planners by size."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for planner in DRAWN:
        medians = [statistics.median(bench.ratios(planner, gpus, seeds)) for gpus in fleet.SIZES]
        axes.plot(fleet.SIZES, medians, marker="o", markersize=3, linewidth=1.2, label=planner)
    axes.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
    axes.set_xticks(fleet.SIZES)
    axes.set_xlabel("GPUs of the cluster")
    axes.set_ylabel("makespan over the bound")
    axes.grid(axis="y", linewidth=0.3)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
