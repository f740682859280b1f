"""From the last batch of a round to the first batch of the next, inside one job.

Members train for real, one after another on one slot; each round has the next of them.

    python tests/benchmarks/round_bench.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tables import Figure, Table

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.profile import MemberProfile
from hetctl.model.run import RunSpec
from hetctl.model.site import Queue, Site
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_files import write_spec

ROUNDS = 6
BARS_S = {"tensorflow": 0.23, "pytorch": 0.1}
MODULES = {"tensorflow": "tiny", "pytorch": "tiny_torch"}
ENSEMBLES = Path(__file__).parent.parent / "ensembles"
TIMED = """
import os, time
from {module} import input_fn, model_fn, fit_train_fn

def train_fn(data, model, optimizer, config):
    return fit_train_fn(timed(data), model, optimizer, config)

def timed(data):
    with open(os.environ["TIMES"], "a") as file:
        for batch in data:
            print(time.time(), file=file)
            yield batch
            print(time.time(), file=file)
"""
"""Functions of an ensemble: they note when each batch comes, and when it has been trained."""


def gaps(framework: str) -> list[float]:
    """Run a job; return the seconds between its rounds."""
    with tempfile.TemporaryDirectory() as name:
        folder, times = Path(name), Path(name) / "times"
        (folder / "timed.py").write_text(TIMED.format(module=MODULES[framework]))
        run = _run(folder, framework)
        command = [sys.executable, "-m", "hetctl.runtime.driver", run.path, "--job", "0"]
        environment = {**os.environ, "TIMES": str(times), "PYTHONPATH": str(ENSEMBLES)}
        subprocess.run(
            [*map(str, command), "--deadline", str(time.time() + 3000)], env=environment, check=True
        )
        marks = [float(line) for line in times.read_text().split()]
    each = len(marks) // ROUNDS
    return [marks[each * number] - marks[each * number - 1] for number in range(1, ROUNDS)]


def _run(folder: Path, framework: str) -> RunFolder:
    """Write a run of as many members as rounds, of one epoch each."""
    stop = StopRule("val_accuracy", "max", max_epochs=1)
    functions = Functions("timed:input_fn", "timed:model_fn", "timed:train_fn")
    members = tuple(Member(f"m{n}", {"units": 16 + n}, 32, n, stop, max_gpus=1) for n in range(ROUNDS))
    site = Site("local", "local", "local", 1, 1, 2, 2**30, (Queue("local"),), device="slot")
    run = RunFolder(folder / "runs" / "r")
    run.create()
    spec = RunSpec(
        run="r",
        ensemble=Ensemble("e", framework, functions, members, str(folder)),
        site=site,
        planner="flotilla",
        gpus=1,
        queue="local",
        wall_s=3600,
        grace_s=60,
        profiles=tuple(MemberProfile(m.name, {1: 1000.0}, None, 640) for m in members),
        checkpoints=str(folder / "checkpoints"),
    )
    write_spec(run, spec)
    return run


def table(_quick: bool = False) -> Table:
    """Measure both frameworks."""
    found = {framework: gaps(framework) for framework in MODULES}
    rows = tuple(
        (framework, *(f"{f(seconds):.2f}" for f in (statistics.median, max)))
        for framework, seconds in found.items()
    )
    figures = tuple(
        Figure(f"seconds from round to round, {framework}", statistics.median(seconds), BARS_S[framework])
        for framework, seconds in found.items()
    )
    note = f"{ROUNDS} rounds in one job, a member each; {os.cpu_count()} cores."
    return Table("From round to round", ("framework", "median, s", "longest, s"), rows, figures, note)


def main() -> int:
    """Print the table; exit code 1: a bar is passed."""
    result = table()
    print(result)
    return 0 if all(figure.holds for figure in result.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
