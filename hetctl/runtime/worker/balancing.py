"""Batch sizes of a group that follow the speeds of its ranks (LB-BSP, Algorithm 3).

Before each step every rank reports the time of its last ones, and rank 0 answers with the sizes of the next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from hetctl.methods.balance.drift import DriftDetector
from hetctl.methods.balance.manager import BatchSizeManager, Observation
from hetctl.methods.balance.managers import is_alike, made_of, manager_of, state_of
from hetctl.methods.balance.observation_log import LoggedIteration, ManagerStart, line_of, logged
from hetctl.methods.balance.predictors.base import Values
from hetctl.methods.balance.predictors.learner import Learner
from hetctl.model.serialization import decode, encode
from hetctl.model.training_progress import RankShare
from hetctl.model.training_settings import ON, BalanceSettings
from hetctl.runtime.data.batches import GO_ON
from hetctl.runtime.data.sampler import parts_of
from hetctl.runtime.frameworks.packed_state import pack, unpack
from hetctl.runtime.job_logs import log_line
from hetctl.runtime.worker.background_training import BackgroundTraining
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.hardware import NodeLoad
from hetctl.runtime.worker.member_trainer import Reporter
from hetctl.runtime.worker.messages import TrainingSpec
from hetctl.runtime.worker.step_clock import StepTimer
from hetctl.storage.atomic_io import make_private_folder

WARM_UP = 2
"""First steps whose times do not count: they compile, allocate and tune."""
BLOCKING = frozenset({"cpu"})
"""Managers whose answer each step waits for (LB-BSP, section 4: with fast-changing speeds, a late answer is
a wrong one). For the others, a report that arrives after rank 0 has decided counts in a later step."""

TAKES_LATE = frozenset({"gpu"})
"""Managers that use steps which began with older sizes: this one moves a few samples at a time, and skipping
every other step would halve its speed. `curve` would judge its new sizes by times of the old ones."""

UNREADABLE = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of a state that is no state of a manager."""
Arrays = Mapping[str, npt.NDArray[Any]]

StepReport = tuple[int, float, float, float]
"""Step, its seconds, the share of available cores, and that of memory in use."""


@dataclass(frozen=True)
class Balance:
    """Balancing of a group as it is at its start.

    Parameters
    ----------
    workers : tuple of str
        Node and GPU of each rank, as in `RankShare`.
    sizes : tuple of int
        First batch sizes by rank.
    unlike : bool
        True if the ranks have GPUs of several types.
    seed : int
        Seed of the manager's predictor.
    """

    settings: BalanceSettings
    workers: tuple[str, ...]
    sizes: tuple[int, ...]
    unlike: bool = False
    seed: int = 0

    @property
    def managed(self) -> bool:
        """True if a manager sets the sizes from the first step."""
        return self.settings.mode == ON or self.unlike


class Balancer:
    """One rank's side of the balancing; a `StepBalancer`.

    Parameters
    ----------
    leader : BalanceLeader or None
        Manager of the group's sizes, on rank 0 alone.
    timer : StepTimer
        Timer of this rank's steps.
    """

    def __init__(
        self, group: Group, balance: Balance, timer: StepTimer, leader: BalanceLeader | None
    ) -> None:
        self._group = group
        self._timer = timer
        self._load = NodeLoad()
        self._step = 0
        self.leader = leader
        # Every rank begins with the same sizes, and takes over those of rank 0 before the first step.
        self.sizes = (sum(balance.sizes) // group.size,) * group.size

    @property
    def batch_size(self) -> int:
        """Samples of this rank in a full chunk."""
        return self.sizes[self._group.rank]

    def shares(self) -> tuple[RankShare, ...]:
        """Return the parts of the ranks in the last iteration that all have reported."""
        return () if self.leader is None else self.leader.shares()

    def state(self) -> Arrays:
        """Return the manager's state for a checkpoint; empty if there is none."""
        return {} if self.leader is None else self.leader.state()

    def restore(self, state: Arrays) -> None:
        """Have the manager continue with a state."""
        if self.leader is not None:
            self.leader.restore(state)

    def before_step(self, wish: int, left: int) -> int:
        """Exchange times and sizes, and start the time of the step; return rank 0's wish."""
        reports = self._reports()
        answer = None
        if self.leader is None:
            self._group.report(reports)
        else:
            answer = wish, self.leader.next_sizes(reports)
        decision, sizes = self._group.broadcast(answer)
        if decision:
            return int(decision)
        self.sizes = tuple(sizes)
        self._step += 1
        if self.leader is not None:
            self.leader.begin(self._step, is_full=left >= sum(self.sizes))
        self._timer.begin(self._step)
        return GO_ON

    def _reports(self) -> list[StepReport]:
        taken = self._timer.taken()
        if not taken:
            return []
        cpu, memory = self._load.sample()
        return [(step, seconds, cpu, memory) for step, seconds in taken]


def balancer_of(
    spec: TrainingSpec,
    workers: tuple[str, ...],
    group: Group,
    timer: StepTimer,
    events: Reporter,
    log: Path,
    stack: ExitStack,
) -> Balancer:
    """Return the balancer of a group of several ranks.

    Parameters
    ----------
    workers : tuple of str
        Node and GPU of each rank.
    stack : ExitStack
        Stack that ends what it starts.
    """
    (member,) = spec.ensemble.members
    given = spec.allocation.batch_sizes
    sizes = given or parts_of(member.chunk(group.size), (1,) * group.size)
    balance = Balance(spec.balance, workers, sizes, unlike=bool(given), seed=member.seed)
    leader = None
    if group.rank == 0:
        recorder = BalanceRecorder(events, log)
        leader = BalanceLeader(group, balance, recorder, stack.enter_context(closing(BackgroundTraining())))
    return Balancer(group, balance, timer, leader)


class BalanceLeader:
    """Sizes of a group's batches, decided on rank 0 from the reports of all ranks.

    Parameters
    ----------
    background : BackgroundTraining
        Process that trains the networks of the manager's predictor, if it has any.
    """

    def __init__(
        self, group: Group, balance: Balance, recorder: BalanceRecorder, background: BackgroundTraining
    ) -> None:
        self._group = group
        self._balance = balance
        self._recorder = recorder
        self._background = background
        self._waits = balance.settings.manager in BLOCKING
        self._takes_late = balance.settings.manager in TAKES_LATE
        self._drift = DriftDetector(group.size)
        self._manager: BatchSizeManager | None = None
        self._iterations = 0
        self._warned = 0
        self._sizes = balance.sizes
        self._begun: dict[int, tuple[int, ...]] = {}
        self._seen: dict[int, dict[int, StepReport]] = {}
        self._ranks: tuple[RankShare, ...] = ()

    def next_sizes(self, own: Sequence[StepReport]) -> tuple[int, ...]:
        """Return the sizes of the next step; `own` are the reports of rank 0 itself."""
        if self._manager is None and self._balance.managed:
            self._start("several types of GPU" if self._balance.unlike else "balance: on")
        self._add(0, own)
        for rank, reports in self._group.reports(self._waits):
            self._add(rank, reports)
        for step in sorted(step for step, seen in self._seen.items() if len(seen) == self._group.size):
            self._finish(step)
        return self._sizes

    def begin(self, step: int, *, is_full: bool) -> None:
        """Note the beginning of a step; times of the smaller last chunk of an epoch say less."""
        if is_full and step > WARM_UP:
            self._begun[step] = self._sizes

    def shares(self) -> tuple[RankShare, ...]:
        """Return the parts of the ranks in the last iteration that all have reported."""
        return self._ranks

    def state(self) -> Arrays:
        """Return the manager's state for a checkpoint; empty if there is none."""
        if self._manager is None:
            return {}
        # A state whose iterations are not in the log could not be repeated from it.
        self._recorder.flush()
        balance = self._balance
        return pack(
            {
                "settings": encode(balance.settings),
                "workers": balance.workers,
                "iterations": self._iterations,
                "manager": state_of(self._manager),
            }
        )

    def restore(self, state: Arrays) -> None:
        """Continue with a state, if it is that of the same workers with the same total and settings.

        A state that another version of hetctl has written is not used either.
        """
        balance = self._balance
        try:
            given = unpack(state)
            manager, iterations = made_of(given["manager"]), int(given["iterations"])
            same = (decode(BalanceSettings, given["settings"]), given["workers"]) == (
                balance.settings,
                balance.workers,
            )
            new = manager_of(balance.settings, self._sizes, (), balance.seed)
            fits = same and is_alike(manager, new) and sum(manager.batches) == sum(self._sizes)
        except UNREADABLE:
            return
        if fits:
            self._manager, self._sizes, self._iterations = manager, manager.batches, iterations
            self._warned = len(manager.warnings)
            self._begin_manager(manager)

    def _add(self, rank: int, reports: Sequence[StepReport]) -> None:
        for report in reports:
            if report[0] in self._begun:
                self._seen.setdefault(report[0], {})[rank] = report

    def _finish(self, step: int) -> None:
        """Learn from an iteration that all ranks have reported."""
        sizes, reports = self._begun[step], self._seen[step]
        for older in [known for known in self._begun if known <= step]:
            del self._begun[older]
            self._seen.pop(older, None)
        observations = [Observation(size, *reports[rank][1:]) for rank, size in enumerate(sizes)]
        self._ranks = tuple(
            RankShare(worker, seen.batch, seen.seconds)
            for worker, seen in zip(self._balance.workers, observations, strict=True)
        )
        if self._manager is not None:
            if sizes == self._manager.batches or self._takes_late:
                self._update(self._manager, observations)
        elif self._drift.observe([seen.seconds for seen in observations]):
            self._start(_drift_reason(self._ranks))

    def _update(self, manager: BatchSizeManager, observations: Sequence[Observation]) -> None:
        adopted = None if manager.learner is None else self._learn(manager.learner)
        new = manager.update(observations)
        self._iterations += 1
        self._recorder.log(logged(time.time(), observations, new, adopted))
        if new != self._sizes:
            self._sizes = new
            self._recorder.changed(
                [
                    RankShare(rank.worker, size, rank.step_s)
                    for rank, size in zip(self._ranks, new, strict=True)
                ]
            )
        for worker, message in manager.warnings[self._warned :]:
            self._recorder.straggler(self._ranks[worker], message)
        self._warned = len(manager.warnings)

    def _learn(self, learner: Learner) -> Values | None:
        """Give the learner a result if there is one, else the background its training; return the result."""
        found = self._background.result()
        if found is not None:
            learner.adopt(found)
        elif learner.training is not None:
            self._background.offer(learner.training)
        return found

    def _start(self, reason: str) -> None:
        balance = self._balance
        self._manager = manager_of(balance.settings, self._sizes, (), balance.seed)
        self._recorder.started(reason, self._ranks)
        self._begin_manager(self._manager)

    def _begin_manager(self, manager: BatchSizeManager) -> None:
        """Start the process for the manager's networks, if it has any, and log its start."""
        balance = self._balance
        if manager.learner is not None:
            # Here, and not with the first training: mostly no step has begun, and none is delayed.
            self._background.start()
        self._recorder.log(
            ManagerStart(balance.settings, balance.workers, self._sizes, balance.seed, self._iterations)
        )


def _drift_reason(ranks: Sequence[RankShare]) -> str:
    slow = max(ranks, key=lambda rank: rank.step_s)
    fast = min(ranks, key=lambda rank: rank.step_s)
    return (
        f"{slow.worker} takes {slow.step_s:.3g} s for its {slow.batch} samples, {fast.worker}"
        f" {fast.step_s:.3g} s"
    )


LINES_EVERY_S = 1.0
"""Seconds between two writes to the log."""
LONGEST_LINE = 2**20
WHOLE_BYTES = 2**26
"""Size of a log from which on iterations are left out."""
SIZES_EVERY_S = 10.0
"""Least seconds between two events about sizes: some managers change them in each step."""


def interval(size_bytes: int, whole_bytes: int = WHOLE_BYTES) -> int:
    """Return of how many iterations one is written into a log of this size.

    All are at first; then one of 16, and half as many with every further eighth of the first size. So ten
    million iterations with lines of 1 KB take 120 MB, and the log never becomes much larger.
    """
    beyond = (size_bytes - whole_bytes) * 8 // whole_bytes
    return 1 if beyond < 0 else 16 << min(beyond, 10)


class BalanceRecorder:
    """Record of a group's balancing, on rank 0, as events and in a log.

    Parameters
    ----------
    log : Path
        File for the replay.
    whole_bytes : int
        Its size from which on iterations are left out.
    """

    def __init__(self, events: Reporter, log: Path, whole_bytes: int = WHOLE_BYTES) -> None:
        self._events = events
        self._log = log
        self._whole_bytes = whole_bytes
        self._size_bytes = log.stat().st_size if log.exists() else 0
        self._left_out = 0
        self._lines: list[str] = []
        self._is_whole = False
        self._next_lines = 0.0
        self._next_sizes = 0.0

    def started(self, reason: str, ranks: Sequence[RankShare]) -> None:
        """Write a ``balance_started`` event."""
        self._events.write("balance_started", reason=reason, ranks=encode(tuple(ranks)))

    def log(self, record: ManagerStart | LoggedIteration) -> None:
        """Add a record, if the log is not too long; the file gets it within about `LINES_EVERY_S`."""
        if isinstance(record, ManagerStart):
            self._add(record)
        elif (every := interval(self._size_bytes, self._whole_bytes)) > self._left_out + 1:
            self._left_out += 1
        else:
            # Without the iterations that were left out nothing is repeated, so weights are of no use.
            adopted = record.adopted if every == 1 else ""
            self._add(replace(record, left_out=self._left_out, adopted=adopted))
        if time.monotonic() >= self._next_lines:
            self.flush()

    def _add(self, record: ManagerStart | LoggedIteration) -> None:
        self._left_out = 0
        self._lines.append(line_of(record))
        self._size_bytes += len(self._lines[-1])

    def flush(self) -> None:
        """Append the records since the last call; training goes on if the disk is full."""
        self._next_lines = time.monotonic() + LINES_EVERY_S
        lines, self._lines = self._lines, []
        try:
            make_private_folder(self._log.parent)
            with self._log.open("ab") as file:
                if not self._is_whole:
                    file.truncate(_whole_lines(self._log))
                    self._is_whole = True
                file.write("".join(lines).encode())
        except OSError as error:
            log_line(f"{len(lines)} records of {self._log.name} are lost: {error}")

    def changed(self, ranks: Sequence[RankShare]) -> None:
        """Write a ``batch_sizes`` event, if the last one is `SIZES_EVERY_S` old."""
        if time.monotonic() >= self._next_sizes:
            self._next_sizes = time.monotonic() + SIZES_EVERY_S
            self._events.write("batch_sizes", ranks=encode(tuple(ranks)))

    def straggler(self, rank: RankShare, message: str) -> None:
        """Write a ``straggler`` event."""
        self._events.write("straggler", rank=encode(rank), message=message)


def _whole_lines(path: Path) -> int:
    """Return the bytes of the whole lines of a file: a killed process may have torn the last one."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LONGEST_LINE))
        tail = file.read()
    return size - (len(tail) - tail.rfind(b"\n") - 1)
