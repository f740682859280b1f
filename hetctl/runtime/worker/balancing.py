"""Batch sizes of a group that follow the speeds of its ranks (LB-BSP, Algorithm 3).

Before each step every rank reports the times of its last steps; rank 0 answers with the next sizes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetctl.methods.balance.manager import BatchSizeManager, DriftDetector, Observation
from hetctl.methods.balance.managers import dump_state, load_state, make_manager, same_structure
from hetctl.methods.balance.observation_log import LoggedIteration, ManagerStart, json_line, logged
from hetctl.model.serialization import decode, encode
from hetctl.model.training_progress import RankShare
from hetctl.model.training_settings import ON, BalanceSettings
from hetctl.runtime.data.batches import GO_ON
from hetctl.runtime.data.sampler import parts_of
from hetctl.runtime.frameworks.packed_state import pack, unpack
from hetctl.runtime.job_logs import log_line
from hetctl.runtime.worker.background_training import BackgroundTraining
from hetctl.runtime.worker.checkpoint import Arrays
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.hardware import NodeLoad
from hetctl.runtime.worker.messages import TrainingSpec
from hetctl.runtime.worker.step_clock import StepTimer
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.event_files import EventWriter

WARM_UP = 2
"""Number of first steps, whose times do not count: they compile, allocate and tune."""
BLOCKING = frozenset({"cpu"})
"""Managers whose answer each step waits for: with fast-changing speeds a late answer is wrong (LB-BSP,
section 4). With the others, a report that arrives after rank 0's decision counts in a later step."""

TAKES_LATE = frozenset({"gpu"})
"""Managers that use steps which began with older sizes: this one moves a few samples at a time, and would be
half as fast if it skipped every other step. `curve` would judge its new sizes by times of the old ones."""

UNREADABLE = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of data that is no state of a manager."""

StepReport = tuple[int, float, float, float]
"""Step, its seconds, the share of available cores, and the share of memory in use."""


class Balancer:
    """One rank's side of the balancing; a `StepBalancer`.

    Parameters
    ----------
    timer : StepTimer
        Timer of this rank's steps.
    total : int
        Samples of a step of the whole group.
    """

    def __init__(self, group: Group, timer: StepTimer, total: int) -> None:
        self._group, self._timer = group, timer
        self._load = NodeLoad()
        self._step = 0
        # All ranks begin with equal sizes, and take over rank 0's before the first step.
        self.sizes = (total // group.size,) * group.size

    @property
    def batch_size(self) -> int:
        """Samples of this rank in a full chunk."""
        return self.sizes[self._group.rank]

    def shares(self) -> tuple[RankShare, ...]:
        """Return, on rank 0, the parts of the ranks in the last iteration that all ranks have reported."""
        return ()

    def state(self) -> Arrays:
        """Return, on rank 0, the manager's state for a checkpoint; empty if there is none."""
        return {}

    def restore(self, state: Arrays) -> None:
        """Have the manager continue with rank 0's state, if it suits the group."""

    def before_step(self, decision: int, left: int) -> int:  # noqa: ARG002
        """Exchange times and sizes, and start the step's timer; return rank 0's decision."""
        taken = self._timer.taken()
        cpu, memory = self._load.sample() if taken else (0.0, 0.0)
        reports = [(step, seconds, cpu, memory) for step, seconds in taken]
        decision, sizes = self._group.broadcast(self._answer(decision, reports))
        if decision:
            return int(decision)
        self.sizes = tuple(sizes)
        self._step += 1
        self._timer.begin(self._step)
        return GO_ON

    def _answer(self, decision: int, reports: Sequence[StepReport]) -> Any:  # noqa: ARG002
        """Send the times to rank 0; return its decision and the sizes of the next step."""
        self._group.report(reports)


def make_balancer(
    spec: TrainingSpec, group: Group, timer: StepTimer, events: EventWriter, log: Path, stack: ExitStack
) -> Balancer:
    """Return the balancer of a group of several ranks; the stack ends what it starts."""
    (member,) = spec.ensemble.members
    given = spec.allocation.batch_sizes
    sizes = given or parts_of(member.step_samples(group.size), (1,) * group.size)
    if group.rank != 0:
        return Balancer(group, timer, sum(sizes))
    start = ManagerStart(spec.balance, spec.worker_names, sizes, member.seed)
    background = stack.enter_context(closing(BackgroundTraining()))
    return LeadingBalancer(group, timer, start, events, BalanceLog(log), background, types_differ=bool(given))


class LeadingBalancer(Balancer):
    """The balancing on rank 0, which decides on the sizes from the reports of all ranks.

    Parameters
    ----------
    start : ManagerStart
        Settings, workers and first sizes.
    background : BackgroundTraining
        Process that trains the networks of the manager's predictor, if it has any.
    types_differ : bool
        True if the ranks have GPUs of several types.
    """

    def __init__(
        self,
        group: Group,
        timer: StepTimer,
        start: ManagerStart,
        events: EventWriter,
        log: BalanceLog,
        background: BackgroundTraining,
        *,
        types_differ: bool = False,
    ) -> None:
        super().__init__(group, timer, sum(start.batches))
        self._start, self._events, self._log = start, events, log
        self._background = background
        self._types_differ = types_differ
        self._drift = DriftDetector(group.size)
        self._manager: BatchSizeManager | None = None
        self._iterations = 0
        self._warned = 0
        self._next_sizes = start.batches
        self._sizes_told_at = -SIZES_EVERY_S
        self._begun: dict[int, tuple[int, ...]] = {}
        self._seen: dict[int, dict[int, StepReport]] = {}
        self._ranks: tuple[RankShare, ...] = ()

    def before_step(self, decision: int, left: int) -> int:
        """Exchange times and sizes, and note the start of a step whose time counts."""
        decision = super().before_step(decision, left)
        if decision == GO_ON and self._step > WARM_UP and left >= sum(self.sizes):
            self._begun[self._step] = self.sizes
        return decision

    def _answer(self, decision: int, reports: Sequence[StepReport]) -> Any:
        settings = self._start.settings
        if self._manager is None and (settings.mode == ON or self._types_differ):
            self._begin("several types of GPU" if self._types_differ else "balance: on")
        for rank, those in [(0, reports), *self._group.reports(settings.manager in BLOCKING)]:
            for report in those:
                if report[0] in self._begun:
                    self._seen.setdefault(report[0], {})[rank] = report
        for step in sorted(step for step, seen in self._seen.items() if len(seen) == self._group.size):
            self._finish(step)
        return decision, self._next_sizes

    def shares(self) -> tuple[RankShare, ...]:
        """Return the parts of the ranks in the last iteration that all ranks have reported."""
        return self._ranks

    def state(self) -> Arrays:
        """Return the manager's state for a checkpoint; empty if there is none."""
        if self._manager is None:
            return {}
        # A replay from the log needs all iterations that led to this state.
        self._log.flush()
        return pack(
            {
                "settings": encode(self._start.settings),
                "workers": self._start.workers,
                "iterations": self._iterations,
                "manager": dump_state(self._manager),
            }
        )

    def restore(self, state: Arrays) -> None:
        """Continue with a state of the same workers, total, settings and version of hetctl; ignore others."""
        start = self._start
        try:
            given = unpack(state)
            manager, iterations = load_state(given["manager"]), int(given["iterations"])
            settings = decode(BalanceSettings, given["settings"])
            same = (settings, given["workers"]) == (start.settings, start.workers)
            new = make_manager(start.settings, start.batches, (), start.seed)
            fits = same and same_structure(manager, new) and sum(manager.batches) == sum(start.batches)
        except UNREADABLE:
            return
        if fits:
            self._manager, self._iterations = manager, iterations
            self._warned = len(manager.warnings)
            self._begin_manager(manager)

    def _finish(self, step: int) -> None:
        """Learn from an iteration that all ranks have reported."""
        sizes, reports = self._begun[step], self._seen[step]
        for older in [known for known in self._begun if known <= step]:
            del self._begun[older]
            self._seen.pop(older, None)
        observations = [Observation(size, *reports[rank][1:]) for rank, size in enumerate(sizes)]
        self._ranks = tuple(
            RankShare(worker, seen.batch, seen.seconds)
            for worker, seen in zip(self._start.workers, observations, strict=True)
        )
        if self._manager is not None:
            if sizes == self._manager.batches or self._start.settings.manager in TAKES_LATE:
                self._update(self._manager, observations)
        elif self._drift.observe([seen.seconds for seen in observations]):
            slow = max(self._ranks, key=lambda rank: rank.step_s)
            fast = min(self._ranks, key=lambda rank: rank.step_s)
            slowness = f"{slow.worker} takes {slow.step_s:.3g} s for its {slow.batch} samples"
            self._begin(f"{slowness}, {fast.worker} {fast.step_s:.3g} s")

    def _update(self, manager: BatchSizeManager, observations: Sequence[Observation]) -> None:
        adopted, learner = None, manager.learner
        if learner is not None:
            adopted = self._background.result()
            if adopted is not None:
                learner.adopt(adopted)
            elif learner.training is not None:
                self._background.offer(learner.training)
        new = manager.update(observations)
        self._log.add(logged(time.time(), self._iterations, observations, new, adopted))
        self._iterations += 1
        is_changed, self._next_sizes = new != self._next_sizes, new
        if is_changed and time.monotonic() >= self._sizes_told_at + SIZES_EVERY_S:
            self._sizes_told_at = time.monotonic()
            ranks = [replace(rank, batch=size) for rank, size in zip(self._ranks, new, strict=True)]
            self._events.write("batch_sizes", ranks=encode(ranks))
        for worker, message in manager.warnings[self._warned :]:
            self._events.write("straggler", rank=encode(self._ranks[worker]), message=message)
        self._warned = len(manager.warnings)

    def _begin(self, reason: str) -> None:
        start = self._start
        self._manager = make_manager(start.settings, start.batches, (), start.seed)
        self._events.write("balance_started", reason=reason, ranks=encode(self._ranks))
        self._begin_manager(self._manager)

    def _begin_manager(self, manager: BatchSizeManager) -> None:
        """Log the manager's start; start the process if it has networks."""
        self._next_sizes = manager.batches
        if manager.learner is not None:
            # Not with the first training: here mostly no step has begun that it could delay.
            self._background.start()
        self._log.add(replace(self._start, batches=manager.batches, continued=self._iterations))


LINES_EVERY_S = 1.0
"""Seconds between two writes to the log."""
LONGEST_LINE = 2**20
FULL_LOG_BYTES = 2**26
"""Size of a log beyond which it leaves iterations out."""
SIZES_EVERY_S = 10.0
"""Least seconds between two events about sizes: some managers change sizes in each step."""


def logging_interval(size_bytes: int, full_log_bytes: int = FULL_LOG_BYTES) -> int:
    """Return n for a log of this size: it gets one of n iterations.

    At first it gets all, then one of 16, and half as many with each further eighth of the first size. So ten
    million iterations with lines of 1 KB take 120 MB, and the log hardly grows beyond.
    """
    beyond = (size_bytes - full_log_bytes) * 8 // full_log_bytes
    return 1 if beyond < 0 else 16 << min(beyond, 10)


class BalanceLog:
    """Log of a manager's input, for the replay; training goes on if the disk is full.

    Parameters
    ----------
    full_log_bytes : int
        Size of the file beyond which iterations are left out.
    """

    def __init__(self, path: Path, full_log_bytes: int = FULL_LOG_BYTES) -> None:
        self._path = path
        self._full_log_bytes = full_log_bytes
        self._size_bytes = path.stat().st_size if path.exists() else 0
        self._lines: list[str] = []
        self._is_whole = False
        self._next_lines = 0.0

    def add(self, record: ManagerStart | LoggedIteration) -> None:
        """Add a record, unless the log is too long; the file gets it within about `LINES_EVERY_S`."""
        every = logging_interval(self._size_bytes, self._full_log_bytes)
        if isinstance(record, ManagerStart) or record.number % every == 0:
            self._lines.append(json_line(record))
            self._size_bytes += len(self._lines[-1])
        if time.monotonic() >= self._next_lines:
            self.flush()

    def flush(self) -> None:
        """Append the records since the last call."""
        self._next_lines = time.monotonic() + LINES_EVERY_S
        lines, self._lines = self._lines, []
        try:
            make_private_folder(self._path.parent)
            with self._path.open("ab") as file:
                if not self._is_whole:
                    file.truncate(_whole_lines(self._path))
                    self._is_whole = True
                file.write("".join(lines).encode())
        except OSError as error:
            log_line(f"{len(lines)} records of {self._path.name} are lost: {error}")


def _whole_lines(path: Path) -> int:
    """Return the bytes of the whole lines of a file: a killed process may have torn the last one."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LONGEST_LINE))
        tail = file.read()
    return size - (len(tail) - tail.rfind(b"\n") - 1)
