"""Cost of whole commands on large runs and tables, from the start of their processes to the end.

The event files are written as a driver and its trainers write them, without training anything.

    python tests/benchmarks/commands_bench.py [--quick]
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planning_time import ensemble
from state_bench import RUN, append_events, checkpoint, enter, epoch_done, large_spec
from tables import Figure, Table

from hetctl.catalog.catalog import Catalog
from hetctl.model.events import DRIVER
from hetctl.runtime.driver.run_members import RunMembers
from hetctl.storage.paths import Home
from hetctl.storage.run_files import read_spec, write_spec
from hetctl.storage.run_results import keep_results, results_of
from hetctl.storage.run_state import state_in

EPOCH_S = 10.0
RUNS = ((10_000, 100), (200, 5_000), (200, 10_000))
"""Members, and epochs of each; the last has twice the epochs of the one before."""
TABLES = ((100, 160), (10_000, 8))
"""Members, and numbers of GPUs on which the rates of each are known."""
QUICK_RUNS, QUICK_TABLES = ((100, 20), (20, 100), (20, 200)), ((20, 16), (100, 8))
LAUNCHER = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
"""
"""Small process that starts a command, whose peak of memory includes that of the process that forks it."""
BARS_S = {"status": 0.5, "runs": 0.5, "logs": 0.5, "compare": 0.5, "edit in the driver": 1.0, "advance": 2.0}
MOST_MB, IMPORT_S = 200.0, (1.5, 10.0)
OTHER = "other-001"
"""Run that `compare` compares with."""


@dataclass(frozen=True)
class Cost:
    """Processor time in seconds and peak memory in megabytes of a process."""

    seconds: float
    megabytes: float


def cost_of(*command: str, folder: Path, tools: Path | None = None) -> Cost:
    """Run a command of hetctl in a folder; return its cost."""
    environment = {**os.environ, "HETCTL_HOME": str(folder / ".hetctl")}
    environment["PATH"] = f"{tools or ''}:{environment['PATH']}"
    # An installed package has its bytecode.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    words = [sys.executable, "-S", "-c", LAUNCHER, sys.executable, "-m", "hetctl", *command]
    done = subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    seconds, kibibytes = done.stdout.split()
    return Cost(float(seconds), float(kibibytes) / 1024)


def slurm_in(folder: Path) -> Path:
    """Write commands of a Slurm that takes every job, and whose job 17 runs."""
    tools = folder / "tools"
    tools.mkdir()
    running = 'case "$*" in *NodeList*) echo "17|RUNNING|0:0|None|n1|";; esac'
    for name, answer in {"sbatch": "echo 18", "squeue": running, "sacct": "true", "scancel": "true"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tools / name).chmod(0o755)
    return tools


def told_by_trainer(number: int, epochs: range, began_at: float) -> Iterator[dict[str, Any]]:
    for epoch in epochs:
        at = began_at + EPOCH_S * epoch
        yield {"kind": "checkpoint", "time": at, **checkpoint(f"net-{number:05d}", epoch, 0)}
        yield {**epoch_done(number, epoch, at), "evaluate_s": 5.25}


def write_run(folder: Path, members: int, epochs: int) -> None:
    """Write a run whose job is about to end, with its snapshot."""
    home = Home(folder / ".hetctl")
    spec, run = large_spec(home, members), home.run(RUN).create()
    began_at = time.time() - EPOCH_S * (epochs + 10)
    start = {"kind": "job_started", "time": began_at, "job": 0, "batch_id": "17", "nodes": []}
    append_events(run.events_of(DRIVER), 0, [start])
    write_spec(run, spec)
    enter(home, spec, began_at)
    for number, member in enumerate(spec.ensemble.members):
        append_events(run.events_of(member.name), 0, told_by_trainer(number, range(1, epochs + 1), began_at))
    state = state_in(run, spec)
    state.keep()
    keep_results(run, results_of(state, spec))
    other = home.run(OTHER).create()
    for name in (run.spec.name, run.results.name):
        shutil.copy(run.path / name, other.path / name)
    shutil.copytree(run.events, other.events, dirs_exist_ok=True, ignore=lambda _, names: _of_members(names))
    other_spec = replace(spec, run=OTHER, retries=5)
    write_spec(other, other_spec)
    enter(home, other_spec, began_at - 1)
    with Catalog.open(home.catalog) as catalog:
        catalog.set_run_state(OTHER, "finished")


def _of_members(names: Sequence[str]) -> set[str]:
    return {name for name in names if name.startswith("net-")}


def edit_s(folder: Path) -> float:
    """Return the processor time that a driver needs until it goes on with one more member, in seconds."""
    run = Home(folder / ".hetctl").run(RUN)
    spec = read_spec(run)
    members = RunMembers(run, spec, spec.gpus, dict)
    new = replace(spec.ensemble.members[0], name="new")
    ensemble = replace(spec.ensemble, members=(*spec.ensemble.members, new))
    began = time.process_time()
    members.edit(replace(spec, ensemble=ensemble))
    return time.process_time() - began


def run_costs(members: int, epochs: int) -> dict[str, Cost]:
    """Return the costs of commands on one run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = slurm_in(folder)
        write_run(folder, members, epochs)
        costs = {
            " ".join(command[:1]): cost_of(*command, folder=folder, tools=tools)
            for command in (
                ("status", RUN),
                ("runs",),
                ("logs", RUN, "net-00007"),
                ("compare", RUN, OTHER),
                ("pause", RUN, "net-00007"),
            )
        }
        costs["edit in the driver"] = Cost(edit_s(folder), math.nan)
        advance = cost_of("advance", RUN, "--after-job", "0", folder=folder, tools=tools)
        (folder / ".hetctl/runs" / RUN / "state.jsonl").unlink()
        return {
            **costs,
            "advance": advance,
            "status without a snapshot": cost_of("status", RUN, folder=folder, tools=tools),
        }


def table_costs(members: int, sizes: int) -> dict[str, Cost]:
    """Return the costs of commands on one table of rates."""
    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), ["member,gpus,rate,samples"]
        for each in ensemble(members):
            rates = list(each.rates.items()) + [(gpus, 1e3 * gpus**0.5) for gpus in range(65, sizes + 1)]
            rows += [f"{each.name},{gpus},{rate},{each.samples_left}" for gpus, rate in rates[:sizes]]
        (folder / "rates.csv").write_text("\n".join(rows) + "\n")
        profile = cost_of("profile", "import", "rates.csv", "--name", "zoo", folder=folder)
        simulate = ("simulate", "zoo", "--gpus", str(sizes), "--restart-seconds", "10")
        return {"profile import": profile, "simulate": cost_of(*simulate, folder=folder)}


def table(quick: bool = False) -> Table:
    """Measure all commands."""
    runs = {size: run_costs(*size) for size in (QUICK_RUNS if quick else RUNS)}
    rates = {size: table_costs(*size) for size in (QUICK_TABLES if quick else TABLES)}
    rows = [
        (
            f"{command}, {members:,} x {count:,}",
            f"{cost.seconds:.2f}",
            "-" if math.isnan(cost.megabytes) else f"{cost.megabytes:.0f}",
        )
        for (members, count), costs in {**runs, **rates}.items()
        for command, cost in costs.items()
    ]
    *both, twice = runs.items()
    figures = []
    for (members, epochs), costs in both:
        for command, bar in BARS_S.items():
            figures.append(Figure(f"{command}, {members:,} x {epochs:,}, s", costs[command].seconds, bar))
        for command in ("status", "advance"):
            on = f"{command}, {members:,} x {epochs:,}"
            figures.append(Figure(f"{on}, MB", costs[command].megabytes, MOST_MB))
    figures += [
        Figure(f"{command}, twice the epochs, ratio", twice[1][command].seconds / cost.seconds, 2.2)
        for command, cost in both[-1][1].items()
    ]
    for bar, ((members, sizes), costs) in zip(IMPORT_S, rates.items(), strict=True):
        figures += [Figure(f"{name}, {members:,} x {sizes}, s", c.seconds, bar) for name, c in costs.items()]
    return Table(
        "Whole commands",
        ("command", "processor time, s", "peak memory, MB"),
        tuple(rows),
        tuple(figures),
        "Runs of members x epochs, and tables of members x numbers of GPUs.",
    )


def main() -> int:
    """Print the table; exit code 1: a bar is passed."""
    result = table("--quick" in sys.argv[1:])
    print(result)
    return 0 if all(figure.holds for figure in result.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
