"""Cost of the state of a large run: the driver's decisions, its restart, `status`, `--watch`.

The event files are written as a driver and its trainers write them, without training anything.

    python tests/benchmarks/state_bench.py
"""

from __future__ import annotations

import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reporting_ranks import ReportingRanks, reporting_ranks
from rich.console import Console
from tables import Figure, Table

from hetctl.app.project import Project
from hetctl.app.run.status import RunWatch
from hetctl.catalog.catalog import Catalog
from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.events import DRIVER
from hetctl.model.job import Job, JobState
from hetctl.model.plan import DATA_PARALLEL, Allocation, Forecast, Placement, Plan, Round
from hetctl.model.profile import MemberProfile
from hetctl.model.run import RunSpec
from hetctl.model.serialization import encode
from hetctl.model.site import Queue, Site
from hetctl.model.training_progress import EpochResult
from hetctl.reports.status_table import status_table
from hetctl.runtime.driver.run_members import RunMembers
from hetctl.scheduling.commands import Task
from hetctl.scheduling.job_scheduler import RunningTask
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import Home, RunFolder
from hetctl.storage.run_files import write_spec
from hetctl.storage.run_state import RunState

MEMBERS, ROUNDS = 10_000, 3
LAST = ROUNDS - 1
IN_TRAINING = 1_000
"""Members of the last round whose steps have not ended."""
GPUS_PER_NODE = 8
NEWS = 10
"""Members that finish an epoch between two decisions, or two polls."""
TIMES = 15
ROUND_S = 1000.0
EPOCH_SAMPLES = 10_000
RUN = "large-001"
RESTART = """
import sys, time
from pathlib import Path
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_files import read_planner_state, read_spec
from hetctl.runtime.driver.driver import Driver
from hetctl.runtime.driver.run_members import RunMembers
folder = RunFolder(Path(sys.argv[1]))
spec = read_spec(folder)
members = RunMembers(folder, spec, spec.gpus, dict)
read_planner_state(folder)
assert len(members.seen([], time.time()).left) == len(spec.ensemble.members)
"""
"""What a driver does before its first decision, its imports included."""


@dataclass(frozen=True)
class Sample:
    """A run on the disk, of which the last round is under way."""

    project: Project
    spec: RunSpec

    @property
    def folder(self) -> RunFolder:
        return self.project.home.run(self.spec.run)

    @property
    def training(self) -> list[str]:
        """The members in training."""
        return [member.name for member in self.spec.ensemble.members[:IN_TRAINING]]

    @property
    def in_training(self) -> tuple[Allocation, ...]:
        """Where they train."""
        return _allocations(self.spec.ensemble)[:IN_TRAINING]

    def events(self) -> dict[str, EventWriter]:
        """Return what writes the events of those in training; nobody is told."""
        return {name: EventWriter(self.folder.events, name, LAST) for name in self.training}

    def running(self) -> dict[str, RunningTask]:
        return {a.member: RunningTask(Task(a), LAST, a.rate, 0.0) for a in self.in_training}


def sample(folder: Path) -> Sample:
    """Write a run of `MEMBERS` members and `ROUNDS` rounds, an epoch in each."""
    home = Home(folder / ".hetctl")
    project, spec = Project(folder, home), large_spec(home)
    began_at = time.time() - ROUNDS * ROUND_S
    run = home.run(RUN).create()
    for index in range(ROUNDS):
        at = began_at + index * ROUND_S
        unfinished = IN_TRAINING if index == LAST else 0
        append_events(run.events_of(DRIVER), index, _told_by_driver(spec, index, at, unfinished))
        for number, member in enumerate(spec.ensemble.members):
            told = _told_by_trainer(number, index, at, number < unfinished)
            append_events(run.events_of(member.name), index, told)
    write_spec(run, spec)
    _keep_state(run, spec)
    enter(home, spec, began_at)
    return Sample(project, spec)


def _keep_state(run: RunFolder, spec: RunSpec) -> None:
    """Write the snapshot that the driver does, before the last events of those in training."""
    state = RunState(run, spec.ensemble, spec.retries)
    state.refresh()
    state.keep()
    for number in range(IN_TRAINING):
        stopped = {"kind": "checkpoint", "time": time.time(), **checkpoint(f"net-{number:05d}", ROUNDS, 500)}
        append_events(run.events_of(f"net-{number:05d}"), LAST, [stopped])


def large_spec(home: Home, count: int = MEMBERS) -> RunSpec:
    """Return the specification of a run with so many members."""
    rule = StopRule("val_accuracy", "max", max_epochs=100)
    members = tuple(
        Member(
            f"net-{n:05d}", {"units": 16 + n, "dropout": 0.1, "learning_rate": 1e-3}, 32, n, rule, max_gpus=4
        )
        for n in range(count)
    )
    rates = {1: 100.0, 2: 190.0, 3: 270.0, 4: 350.0}
    return RunSpec(
        run=RUN,
        ensemble=Ensemble("large", "pytorch", Functions("nets:input_fn", "nets:model_fn"), members, "/x"),
        site=Site(
            *("cluster", "slurm", "srun", -(-count // GPUS_PER_NODE), GPUS_PER_NODE, 64, 2**39),
            (Queue("batch"),),
        ),
        planner="fluid",
        gpus=count,
        queue="batch",
        wall_s=86_400,
        grace_s=300,
        profiles=tuple(MemberProfile(m.name, rates, None, EPOCH_SAMPLES, 10.0, 5.0, 1.0) for m in members),
        checkpoints=str(home.checkpoints),
    )


def _allocations(ensemble: Ensemble) -> tuple[Allocation, ...]:
    """Give each member a GPU."""
    places = (divmod(number, GPUS_PER_NODE) for number in range(len(ensemble.members)))
    return tuple(
        Allocation(member.name, 1, DATA_PARALLEL, 100.0, (Placement(f"node{node:04d}", (gpu,)),))
        for member, (node, gpu) in zip(ensemble.members, places, strict=True)
    )


def enter(home: Home, spec: RunSpec, began_at: float) -> None:
    """Have the catalog know the run, planned in as many rounds, and its one job."""
    rounds = tuple(Round(index, ROUND_S, _allocations(spec.ensemble)) for index in range(ROUNDS))
    forecasts = tuple(Forecast(m.name, ROUNDS * ROUND_S, ROUNDS * ROUND_S) for m in spec.ensemble.members)
    plan = Plan(spec.planner, "makespan", spec.gpus, GPUS_PER_NODE, 3000.0, 2900.0, 1.03, rounds, forecasts)
    job = Job(0, f"hetctl-{spec.run}", "17", JobState.RUNNING, spec.site.nodes, spec.wall_s, began_at)
    with Catalog.open(home.catalog) as catalog:
        catalog.add_run(spec, plan, began_at, job)
        catalog.set_run_state(spec.run, "running")


def _told_by_driver(spec: RunSpec, index: int, at: float, unfinished: int) -> Iterator[dict[str, Any]]:
    names = [member.name for member in spec.ensemble.members]
    if index == 0:
        yield {
            "kind": "job_started",
            "time": at,
            "job": 0,
            "batch_id": "17",
            "nodes": [],
            "deadline": at + 9e4,
        }
    yield {
        **{"kind": "round_started", "time": at, "job": 0},
        **{"predicted_s": ROUND_S, "members": names},
    }
    for allocation in _allocations(spec.ensemble):
        placement = encode(allocation.placement)
        yield {
            **{"kind": "task_started", "time": at + 1, "member": allocation.member},
            **{"gpus": 1, "mode": DATA_PARALLEL, "rate": 100.0, "placement": placement, "batch_size": 32},
        }
    for number, name in enumerate(names[unfinished:]):
        yield {
            **{"kind": "task_ended", "time": at + 900 + number / 1000, "member": name, "exit_code": 0},
            **{"reason": "told", "description": "told to leave", "fault": False},
        }
    if not unfinished:
        yield {"kind": "round_ended", "time": at + 950, "ended_by": "alpha"}


def _told_by_trainer(number: int, index: int, at: float, unfinished: bool) -> Iterator[dict[str, Any]]:
    """Report an epoch, the last one of the round before again, and a checkpoint in the midst of the next."""
    name = f"net-{number:05d}"
    if index:
        yield epoch_done(number, index, at - 200)
    yield {"kind": "started", "time": at + 9, "epochs": index, "part_samples": 300 if index else 0}
    yield {"kind": "first_step", "time": at + 10, "startup_s": 9.0, "peak_memory_bytes": 2**31}
    done = epoch_done(number, index + 1, at + 800 + number % 97)
    yield {"kind": "checkpoint", "time": done["time"], **checkpoint(name, index + 1, 0)}
    yield {**done, "evaluate_s": 5.25}
    if not unfinished:
        yield {"kind": "checkpoint", "time": at + 899, **checkpoint(name, index + 1, 300)}
        yield {"kind": "stopped", "time": at + 899.5, "reason": "alpha", "part_samples": 300}


def epoch_done(number: int, epoch: int, at: float) -> dict[str, Any]:
    """Report an epoch of a member whose error falls as Equation 1 of Capes et al. has it."""
    error = 1 / ((0.3 + number % 50 / 100) * epoch + 1.1) + 0.02
    metrics = {"loss": 2 * error, "val_loss": 2.1 * error, "val_accuracy": 1 - error}
    result = EpochResult(epoch, metrics, 100.0, 1, at, 98.0 + number % 5, 32, None, 6.125)
    return {"kind": "epoch", "time": at, **encode(result)}


def checkpoint(name: str, epoch: int, part_samples: int) -> dict[str, Any]:
    path = f"/shared/project/.hetctl/checkpoints/{RUN}/{name}/epoch-{epoch:05d}-{part_samples:012d}.npz"
    size = {"bytes": 104_857_600, "sha256": "0123456789abcdef" * 4, "duration_s": 0.75}
    return {"epoch": epoch, "part_samples": part_samples, "path": path, **size}


def append_events(path: Path, index: int, events: Iterable[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**event, "round": index}) + "\n" for event in events)


def news(run: Sample, events: Mapping[str, EventWriter], epoch: int) -> Iterator[list[str]]:
    """Have some members in training finish an epoch, and then others; return who it was."""
    for at in range(0, TIMES * NEWS, NEWS):
        for number in range(at, at + NEWS):
            events[run.training[number]].write(**epoch_done(number, epoch, time.time()), evaluate_s=5.0)
        yield run.training[at : at + NEWS]


def last_to_leave(run: Sample, events: Mapping[str, EventWriter]) -> Iterator[list[str]]:
    """End the steps of the members in training: of most at once, of the last ones a few at a time."""
    stay = run.training[-TIMES * NEWS :]
    _end(run, run.training[: -TIMES * NEWS], events)
    for at in range(0, len(stay), NEWS):
        _end(run, stay[at : at + NEWS], events)
        yield stay[at : at + NEWS]


def _end(run: Sample, names: list[str], events: Mapping[str, EventWriter]) -> None:
    end = {"exit_code": 0, "reason": "told", "description": "told to leave", "fault": False}
    for name in names:
        events[name].write("checkpoint", **checkpoint(name, ROUNDS, 700))
        events[name].write("stopped", reason="alpha", part_samples=700)
    ends = ({"kind": "task_ended", "time": time.time(), "member": name, **end} for name in names)
    append_events(run.folder.events_of(DRIVER), LAST, ends)


def decisions(
    run: Sample, ranks: ReportingRanks, running: dict[str, RunningTask], happenings: Iterable[list[str]]
) -> list[float]:
    """Return the seconds that a decision takes after each happening, all but the planner's part."""
    members = RunMembers(run.folder, run.spec, run.spec.gpus, ranks.pool.take_written)
    before = dict(members.workloads())
    seconds = []
    for names in happenings:
        began = time.process_time()
        ranks.pool.reap()
        left = members.workloads()
        list(members.members_in_training(running, time.time()))
        members.used_up()
        members.as_they_are(names)
        seconds.append(time.process_time() - began)
        assert all(left[name] != before[name] for name in names), "what was told has not been read"
        before = dict(left)
    return seconds


def polls(run: Sample) -> list[float]:
    """Return the seconds of polls of ``status --watch`` but the first, shown in 40 lines."""
    watch, console = RunWatch(run.project, RUN), Console(file=io.StringIO(), width=120, height=40)
    watch.poll(console.height)
    seconds = []
    for _ in news(run, run.events(), ROUNDS + 1):
        began = time.process_time()
        console.print(status_table(watch.poll(console.height), console.width))
        seconds.append(time.process_time() - began)
    return seconds


def seconds_of(*command: object, folder: Path) -> float:
    """Run a command; return the processor time that it took."""
    environment = {**os.environ, "HETCTL_HOME": str(folder / ".hetctl")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *map(str, command)], env=environment, check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def table(quick: bool = False) -> Table:
    """Measure all, on one run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = sample(folder)
        times = range(1 if quick else 3)
        restarts = [seconds_of("-c", RESTART, run.folder.path, folder=folder) for _ in times]
        statuses = [seconds_of("-m", "hetctl", "status", RUN, folder=folder) for _ in times]
        watched = polls(run)
        with reporting_ranks(run.folder.path, run.spec, LAST, run.in_training) as ranks:
            training = decisions(run, ranks, run.running(), news(run, ranks.events, ROUNDS + 2))
            ending = decisions(run, ranks, {}, last_to_leave(run, ranks.events))
        files = [path.read_bytes() for path in run.folder.events.glob("*.jsonl")]
    found = (
        ("decision at the end of a round, ms", [1000 * seconds for seconds in ending], 10.0),
        ("decision with 1,000 members in training, ms", [1000 * seconds for seconds in training], 10.0),
        ("restart of the driver, s", restarts, 5.0),
        ("`hetctl status`, s", statuses, 1.0),
        ("update of `status --watch`, ms", [1000 * seconds for seconds in watched], 50.0),
    )
    events = sum(text.count(b"\n") for text in files)
    return Table(
        "State of a large run",
        ("quantity", "median", "most"),
        tuple(
            (what, f"{statistics.median(values):,.1f}", f"{max(values):,.1f}") for what, values, _ in found
        ),
        tuple(Figure(what, statistics.median(values), bar) for what, values, bar in found),
        f"Processor time, files in the page cache: {MEMBERS:,} members, {ROUNDS} rounds, {events:,} events "
        f"in {len(files):,} files. Between two decisions or updates {NEWS} of {IN_TRAINING:,} members in "
        "training finish an epoch, or end, and send an event to the driver. A decision is all but the "
        "planner's part: the messages of the ranks, and two reads of the files. A restart is imports, "
        "run.json, the snapshot of the state, later events, and the work left; `status` is the whole "
        f"command. Since the snapshot all {IN_TRAINING:,} in training have reported.",
    )


def main() -> int:
    """Print the table; exit code 1: a bar is passed."""
    result = table()
    print(result)
    return 0 if all(figure.holds for figure in result.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
