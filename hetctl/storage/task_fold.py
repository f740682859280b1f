"""Tasks of a run, as reported by the driver and by the trainers, and the resources that they used."""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from hetctl.model.events import DRIVER, Event, ExitReason
from hetctl.model.run import Usage
from hetctl.model.values import dataclass
from hetctl.storage.snapshot import Line, Lines, OrderedFold, compact, row_of

TaskKey = tuple[int, str]
"""Index of the round, and name of the member."""

LAST_EVENTS = {"converged": ExitReason.FINISHED, "stopped": ExitReason.STOPPED}
"""Exit reason by the last event of a trainer that exits regularly."""


@dataclass(frozen=True)
class TaskRecord:
    """Member on its GPUs in one round, as reported by the driver.

    Parameters
    ----------
    began_at, ended_at : float
        Seconds since the epoch; `ended_at` is None until the end is reported.
    energy_j : float or None
        Energy of its GPUs or slots in joules; None: not measured.
    placement : Any
        Placement as in the event.
    shared : str
        The GPU that it shares; empty if it has its GPUs alone.
    divided_s : float or None
        Seconds of a shared GPU, each divided by the members there; None: it has its GPUs alone.
    """

    began_at: float
    gpus: int
    placement: Any
    ended_at: float | None = None
    exit_code: int | None = None
    energy_j: float | None = None
    shared: str = ""
    divided_s: float | None = None

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds of a task that has ended; 0 before the end."""
        if self.divided_s is not None:
            return self.divided_s
        return 0.0 if self.ended_at is None else (self.ended_at - self.began_at) * self.gpus


Tasks = tuple[TaskRecord, ...]


class TaskFold:
    """Tasks of a run, derived from the driver's events in whatever order they are read."""

    def __init__(self) -> None:
        self._folds: dict[str, dict[int, OrderedFold[Tasks]]] = {}
        self._kept: dict[str, Line] = {}
        """Lines of members whose tasks were not needed since `restore`."""

    def of(self, member: str) -> Mapping[int, Tasks]:
        """Return the tasks of a member, by round."""
        return {index: fold.state for index, fold in self._folds_of(member).items()}

    def lines(self) -> Lines:
        """Return the argument of `restore`: a line of JSON by member."""
        return self._kept | {
            name: compact(
                [[index, fold.last, [row_of(task) for task in fold.state]] for index, fold in rounds.items()]
            ).encode()
            for name, rounds in self._folds.items()
        }

    def restore(self, lines: Lines) -> None:
        """Continue from an earlier state, before events are added."""
        self._kept = dict(lines)

    def add(self, events: Iterable[Event]) -> Mapping[TaskKey, Tasks]:
        """Fold more events; return the tasks that have changed."""
        by_task: dict[TaskKey, list[Event]] = defaultdict(list)
        for event in events:
            if event.source == DRIVER and event.kind in ("task_started", "task_ended"):
                by_task[event.round, event.record.member].append(event)
        for (index, name), new_events in by_task.items():
            self._folds_of(name).setdefault(index, OrderedFold((), _after)).add(new_events)
        return {(index, name): self._folds[name][index].state for index, name in by_task}

    def _folds_of(self, member: str) -> dict[int, OrderedFold[Tasks]]:
        if member not in self._folds:
            self._folds[member] = {
                index: OrderedFold(tuple([TaskRecord(*task) for task in tasks]), _after, tuple(until))
                for index, until, tasks in json.loads(bytes(self._kept.pop(member, b"[]")))
            }
        return self._folds[member]


def _after(tasks: Tasks, event: Event) -> Tasks:
    """Apply the next event; a task that starts again before its end replaces its earlier start."""
    open_tasks = tasks[-1:] if tasks and tasks[-1].ended_at is None else ()
    before = tasks[: len(tasks) - len(open_tasks)]
    record = event.record
    if event.kind == "task_started":
        # Placements as in the event: rows of snapshots have them so, too.
        task = TaskRecord(event.time, record.gpus, event.data.get("placement"))
        if part := next((place for place in record.placement if place.seat), None):
            task = replace(task, shared=f"{part.node} {part.gpus}")
        return (*before, task)
    return (
        *before,
        *(
            replace(
                task,
                ended_at=event.time,
                exit_code=record.exit_code,
                energy_j=record.energy_j,
                divided_s=record.gpu_seconds,
            )
            for task in open_tasks
        ),
    )


@dataclass(slots=True)
class TaskReport:
    """Reports of a task's trainers so far, in the order of their file.

    Parameters
    ----------
    epoch_since : float or None
        Start of the epoch in training: the first step, or the report of the previous epoch.
    rate : float or None
        Samples/s of the last epoch that was trained, or timed within it; None: not known yet.
    exit_reason : ExitReason or None
        Reason for the end, according to the last event of the trainer.
    stop_reasons : tuple of str
        Reasons for which the trainer paused.
    failed_by : str or None
        Reason for the failure, as the value of an `ExitReason`.
    peak_memory_bytes : int or None
        Peak memory in bytes, as last reported.
    last_at : float or None
        Time of the newest event.
    """

    epoch_since: float | None = None
    rate: float | None = None
    exit_reason: ExitReason | None = None
    stop_reasons: tuple[str, ...] = ()
    failed_by: str | None = None
    peak_memory_bytes: int | None = None
    last_at: float | None = None

    def add(self, event: Event) -> None:
        """Apply the next event."""
        kind = event.kind
        self.last_at = event.time if self.last_at is None else max(self.last_at, event.time)
        self.exit_reason = LAST_EVENTS.get(kind, self.exit_reason)
        if kind == "failed":
            self.failed_by = event.record.reason or self.failed_by
            self.peak_memory_bytes = event.record.peak_memory_bytes or self.peak_memory_bytes
        elif kind == "stopped":
            self.stop_reasons += (event.record.reason,)
        elif kind == "first_step":
            self.epoch_since = event.time
            self.peak_memory_bytes = event.record.peak_memory_bytes or self.peak_memory_bytes
        elif kind == "epoch" and "evaluate_s" in event.data:  # others are only reported again
            self.epoch_since, self.rate = event.time, event.record.rate or self.rate
        elif kind == "rate":
            self.rate = event.record.rate


def report_of(events: Iterable[Event]) -> TaskReport:
    """Fold the events of one file."""
    report = TaskReport()
    for event in events:
        report.add(event)
    return report


class UsageFold:
    """Resources used by a run, derived from events in whatever order they are read.

    A killed driver reports no end of its tasks. They count until the last event of its job: the newest one of
    all rounds before the start of the next job.
    """

    def __init__(self) -> None:
        self._rounds = 0
        self.next_round = 0
        self._jobs: list[tuple[float, int]] = []
        """Start and nodes of each job, in order of time."""
        self._job_ends: list[float] = []
        self._last_of_round: dict[int, float] = {}
        self._ended: dict[TaskKey, float] = {}
        """GPU-seconds of the tasks that have ended, by round and member."""
        self._energy: dict[TaskKey, float] = {}
        """Energy in joules of those for which it was measured."""
        self.open_tasks: dict[TaskKey, TaskRecord] = {}
        """Tasks by round and member whose end was not reported."""

    def rows(self) -> list[Any]:
        """Return the argument of `restore`."""
        ended: dict[int, dict[str, float]] = defaultdict(dict)
        for (index, name), gpu_seconds in self._ended.items():
            ended[index][name] = gpu_seconds
        open_tasks = [[*key, row_of(task)] for key, task in self.open_tasks.items()]
        last_of_round = list(self._last_of_round.items())
        jobs = [self._jobs, self._job_ends]
        energy = [[*key, joules] for key, joules in self._energy.items()]
        return [self._rounds, self.next_round, *jobs, last_of_round, list(ended.items()), open_tasks, energy]

    def restore(self, rows: list[Any]) -> None:
        """Continue from an earlier state, before events are added."""
        self._rounds, self.next_round, jobs, self._job_ends, last_of_round, ended, open_tasks, energy = rows
        self._jobs = [(began_at, nodes) for began_at, nodes in jobs]
        self._last_of_round = dict(last_of_round)
        self._ended = {
            (index, name): gpu_seconds for index, of_round in ended for name, gpu_seconds in of_round.items()
        }
        self.open_tasks = {(index, name): TaskRecord(*row) for index, name, row in open_tasks}
        self._energy = {(index, name): joules for index, name, joules in energy}

    @property
    def began_at(self) -> float | None:
        """Start of the first job, in seconds since the epoch; None if none has started."""
        return self._jobs[0][0] if self._jobs else None

    def add(self, events: Iterable[Event], tasks: Mapping[TaskKey, Tasks]) -> None:
        """Add events, and the tasks that have changed with them."""
        for event in events:
            self._count(event)
        for key, states in tasks.items():
            self._ended[key] = math.fsum(task.gpu_seconds for task in states)
            if known := [task.energy_j for task in states if task.energy_j is not None]:
                self._energy[key] = math.fsum(known)
            self.open_tasks.pop(key, None)
            if states and states[-1].ended_at is None:
                self.open_tasks[key] = states[-1]

    def used(self, now: float) -> Usage:
        """Return the resources used; `now` is in seconds since the epoch."""
        newest = self._jobs[-1][0] if self._jobs else -math.inf
        # A new job of the run has started, so the driver of these tasks was
        # killed before it could report their end.
        held = [
            (task, now if task.began_at >= newest else self._lost_at(task.began_at))
            for task in self.open_tasks.values()
        ]
        beside = Counter((task.shared, until) for task, until in held)
        # Of a shared GPU, all that are on it at last count as if they had been there together.
        open_s = (
            (until - t.began_at) * t.gpus / (beside[t.shared, until] if t.shared else 1) for t, until in held
        )
        gpu_seconds = math.fsum((*self._ended.values(), *open_s))
        energy_j = math.fsum(self._energy.values()) if self._energy else None
        return Usage(self._rounds, gpu_seconds, math.fsum(self._node_seconds(now)), energy_j)

    def _node_seconds(self, now: float) -> Iterator[float]:
        """Yield the node-seconds of each job."""
        for (began_at, nodes), following in zip_longest(self._jobs, self._jobs[1:]):
            until = following[0] if following else math.inf
            at = bisect_left(self._job_ends, began_at)
            if at < len(self._job_ends) and self._job_ends[at] <= until:
                ended_at = self._job_ends[at]
            else:
                ended_at = self._lost_at(began_at) if following else max(now, began_at)
            yield (ended_at - began_at) * nodes

    def _lost_at(self, began_at: float) -> float:
        """Return the time at which a task ended with its job."""
        next_job, _ = self._jobs[bisect_right(self._jobs, began_at, key=itemgetter(0))]
        return max([began_at, *(last for last in self._last_of_round.values() if last < next_job)])

    def _count(self, event: Event) -> None:
        if event.source == DRIVER and event.kind == "job_started":
            insort(self._jobs, (event.time, len(event.record.nodes)))
            return
        if event.source == DRIVER and event.kind == "job_ended":
            insort(self._job_ends, event.time)
        last = self._last_of_round.get(event.round, event.time)
        self._last_of_round[event.round] = max(last, event.time)
        if event.source == DRIVER and event.kind == "round_started":
            self._rounds += 1
            self.next_round = max(self.next_round, event.round + 1)
