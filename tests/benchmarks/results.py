"""Write docs/results.md, with its pictures: ``python tests/benchmarks/results.py [SECTION ..]``.

The text is in results.md beside this file, with a place for the table of each section. With sections
named, only those are measured; all other tables stay as they are on the page, each behind its section's name.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
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
PAGE = DOCS / TEXT.name
DRAWN = ("independent", "flotilla", "fluid")
TABLE = re.compile(
    r"^<!-- ([\w-]+) -->\n\n(### .*\n(?:\n(?:[^#|<\n].*\n)+)?(?:\n(?:\|.*\n)+)*)", re.MULTILINE
)
"""A section's name and its table on the page: a heading, perhaps a note, and blocks of rows."""


def main() -> None:
    """Measure, and write when all is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of: {', '.join(bench.SECTIONS)}")
    parser.add_argument("--text", action="store_true", help="measure nothing: only the text is new")
    wishes = parser.parse_args()
    names = wishes.sections or [*bench.SECTIONS] * (not wishes.text)
    if unknown := set(names) - set(bench.SECTIONS):
        parser.error(f"unknown section {', '.join(sorted(unknown))}")
    found = {name: str(table) for name, table in zip(names, bench.measured(names), strict=True)}
    tables = tables_of(PAGE.read_text(encoding="utf-8")) | found
    page = filled(TEXT.read_text(encoding="utf-8"), tables)
    with matplotlib.rc_context({"svg.hashsalt": "results", "svg.fonttype": "none"}):
        for name in PICTURES.keys() & set(names):
            PICTURES[name]()
    PAGE.write_text(page, encoding="utf-8")


def tables_of(page: str) -> dict[str, str]:
    """Return the tables of a page by section."""
    return {name: table.rstrip("\n") for name, table in TABLE.findall(page + "\n")}


def filled(text: str, tables: Mapping[str, str]) -> str:
    """Set the tables into the text, each behind its section's name; sections without one are left out."""
    parts = {
        name.replace("-", "_"): f"<!-- {name} -->\n\n{tables[name]}" if name in tables else ""
        for name in bench.SECTIONS
    }
    page = Template(text).substitute(
        parts, seeds=len(replay.SEEDS), seed=replay.SEEDS[0], restart=f"{fleet.RESTART_S:g}"
    )
    return re.sub(r"\n{3,}", "\n\n", page)


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


PICTURES: dict[str, Callable[[], None]] = {
    "clairvoyant": lambda: draw_ratios(DOCS / "images" / "ratios.svg"),
    "planning": lambda: planning_time.plot(bench.plan_times(planning_time.SIZES), planning_time.IMAGE),
    "balance-accuracy": lambda: accuracy_bench.plot(accuracy_bench.IMAGE),
    "coordination": lambda: coordination_bench.plot(coordination_bench.IMAGE),
    "stages-accuracy": lambda: stage_accuracy_bench.plot(stage_accuracy_bench.IMAGE),
}
"""By the section whose values they show."""

if __name__ == "__main__":
    main()
