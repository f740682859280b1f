"""Log of a manager's input in training, to repeat its decisions and to show the history of balancing."""

from __future__ import annotations

import json
import statistics
from base64 import b64decode, b64encode
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

import numpy as np

from hetctl.methods.balance.curve_manager import (
    FIRST_NOISE,
    LAUNCH_SHARE,
    RECENT,
    Fit,
    StepTimeHistory,
    fit_lines,
)
from hetctl.methods.balance.manager import BatchSizeManager, Observation, equal_batches
from hetctl.methods.balance.managers import make_manager
from hetctl.methods.balance.step_time import Values, fluid_time
from hetctl.model.errors import BadInputError
from hetctl.model.run_status import BalanceHistory, BalancePoint
from hetctl.model.serialization import decode, encode
from hetctl.model.simulation import AnswerDifference
from hetctl.model.training_settings import BalanceSettings
from hetctl.model.values import dataclass

DOUBLE = "<f8"
"""Type of weights, the same on every machine."""
POINTS = 200
"""Most points of a history, each a mean over as many iterations as needed."""


@dataclass(frozen=True)
class ManagerStart:
    """Start or continuation of a manager in a round.

    Parameters
    ----------
    workers : tuple of str
        Node and GPU of each rank.
    batches : tuple of int
        First batch sizes of a new manager, or the sizes of a restored one.
    continued : int
        Number of iterations that a manager restored from a checkpoint has seen; 0 for a new one. Later
        iterations in the log were lost with a killed job.
    """

    settings: BalanceSettings
    workers: tuple[str, ...]
    batches: tuple[int, ...]
    seed: int
    continued: int = 0


@dataclass(frozen=True)
class LoggedIteration:
    """A manager's input for an iteration, by worker, and its answer.

    Parameters
    ----------
    time : float
        Time of the answer, in seconds since the epoch.
    number : int
        Number of the iteration, from 0 at the start of a new manager; a long log leaves some out.
    batches, compute_s, cpu, memory
        As in `Observation`.
    answer : tuple of int
        Batch sizes that the manager set.
    adopted : str
        Weights that its predictor had just adopted, worker by worker, as doubles in Base64; empty if no
        training had ended. They are logged because training on another processor may give other weights, in
        Base64 because writing decimals would delay a step.
    """

    time: float
    number: int
    batches: tuple[int, ...]
    compute_s: tuple[float, ...]
    cpu: tuple[float, ...]
    memory: tuple[float, ...]
    answer: tuple[int, ...]
    adopted: str = ""

    @property
    def observations(self) -> list[Observation]:
        """Observations of all workers."""
        fields = zip(self.batches, self.compute_s, self.cpu, self.memory, strict=True)
        return [Observation(*values) for values in fields]


@dataclass(frozen=True)
class Replay:
    """Repetition of a log.

    Parameters
    ----------
    iterations : tuple of LoggedIteration
        Iterations that were not lost with killed jobs.
    repeated : int
        Number of repeated iterations: of each manager, all before the first gap in the log.
    difference : AnswerDifference or None
        First difference; None if all batches are equal.
    """

    segments: tuple[ManagerStart, ...]
    iterations: tuple[LoggedIteration, ...]
    repeated: int
    difference: AnswerDifference | None


def logged(
    at: float,
    number: int,
    observations: Sequence[Observation],
    answer: tuple[int, ...],
    adopted: Values | None = None,
) -> LoggedIteration:
    """Return an iteration for the log; `adopted` are the weights of a training that had ended, if any."""
    return LoggedIteration(
        at,
        number,
        tuple(seen.batch for seen in observations),
        tuple(seen.seconds for seen in observations),
        tuple(seen.cpu for seen in observations),
        tuple(seen.memory for seen in observations),
        answer,
        "" if adopted is None else b64encode(adopted.astype(DOUBLE).tobytes()).decode(),
    )


def json_line(record: ManagerStart | LoggedIteration) -> str:
    """Return a line of the log, from which exactly the same numbers are read."""
    return json.dumps(encode(record), separators=(",", ":")) + "\n"


def records_in(lines: Iterable[str]) -> Iterator[ManagerStart | LoggedIteration]:
    """Yield the records of a log; ignore a torn last line of a killed process.

    Raises
    ------
    BadInputError
        If any other line is no record; the message begins with its number.
    """
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            return
        try:
            value = json.loads(line)
            if "settings" in value:
                yield decode(ManagerStart, value)
            else:
                yield decode(LoggedIteration, value)
        except (ValueError, TypeError) as error:
            raise BadInputError(f"line {number}: no record of a balance log: {error}") from None


def counted(records: Iterable[ManagerStart | LoggedIteration]) -> list[LoggedIteration]:
    """Return the iterations of a log that were not lost with killed jobs."""
    iterations: list[LoggedIteration] = []
    began = 0
    for record in records:
        if isinstance(record, LoggedIteration):
            iterations.append(record)
        elif record.continued:
            del iterations[bisect_left(iterations, record.continued, began, key=attrgetter("number")) :]
        else:
            began = len(iterations)
    return iterations


def replay(records: Iterable[ManagerStart | LoggedIteration]) -> Replay:
    """Give new managers the logged input, and compare their batches with the logged ones.

    A manager cannot be repeated beyond iterations that the log leaves out.

    Raises
    ------
    BadInputError
        If the log does not begin with a manager's start, or has weights for which no predictor waits.
    """
    segments: list[ManagerStart] = []
    whole: list[ManagerStart | LoggedIteration] = []
    history: list[LoggedIteration] = []
    manager: BatchSizeManager | None = None
    difference: AnswerDifference | None = None
    repeated = 0
    for record in records:
        whole.append(record)
        if isinstance(record, ManagerStart):
            segments.append(record)
            repeated += 0 if record.continued else len(history)
            history = history[: record.continued]
            manager = _repeated(segments, history) if len(history) == record.continued else None
        elif not segments:
            raise BadInputError("line 1: the log must begin with the start of a manager")
        elif manager is not None and record.number == len(history):
            answer = _answer(manager, record)
            if difference is None and answer != record.answer:
                difference = AnswerDifference(len(history), record.answer, answer)
            history.append(record)
        else:
            manager = None
    return Replay(tuple(segments), tuple(counted(whole)), repeated + len(history), difference)


def _repeated(segments: Sequence[ManagerStart], history: Sequence[LoggedIteration]) -> BatchSizeManager:
    """Return the manager after the iterations of `history`."""
    # The manager of a continued segment began in an earlier one.
    first = next(segment for segment in reversed(segments) if not segment.continued)
    manager = make_manager(first.settings, first.batches, (), first.seed)
    for iteration in history:
        _answer(manager, iteration)
    return manager


def _answer(manager: BatchSizeManager, iteration: LoggedIteration) -> tuple[int, ...]:
    """Return a manager's answer to the input of an iteration."""
    if iteration.adopted:
        if manager.learner is None:
            raise BadInputError("the log has weights of networks, but the manager has none")
        try:
            weights = np.frombuffer(b64decode(iteration.adopted, validate=True), DOUBLE)
        except ValueError as error:
            raise BadInputError(f"the log has weights that are no doubles in Base64: {error}") from None
        manager.learner.adopt(weights)
    return manager.update(iteration.observations)


def balance_history(
    member: str, workers: tuple[str, ...], iterations: Sequence[LoggedIteration]
) -> BalanceHistory:
    """Return the history of a member's balancing; `iterations` must not be empty."""
    stride = -(-len(iterations) // POINTS)
    curves = _LearntCurves(iterations[0])
    points = []
    for first in range(0, len(iterations), stride):
        part = iterations[first : first + stride]
        for one in part:
            curves.add(one)
        points.append(BalancePoint(part[-1].time, part[-1].batches, iteration_s(part), curves.t_star_s()))
    measured_s, equal_s = iteration_s(iterations), equal_batches_s(iterations)
    return BalanceHistory(member, workers, tuple(points), measured_s, equal_s)


def iteration_s(iterations: Sequence[LoggedIteration]) -> float:
    """Return the mean time in seconds of the slowest worker."""
    return statistics.fmean(max(one.compute_s) for one in iterations)


def equal_batches_s(iterations: Sequence[LoggedIteration]) -> float:
    """Return the slowest worker's mean time in seconds if batches were equal.

    Each worker's time comes from a line fitted to its times and batches.
    """
    curves = _LearntCurves(iterations[0])
    stride = -(-len(iterations) // POINTS)
    times = []
    for number, one in enumerate(iterations, start=1):
        curves.add(one)
        if number % stride == 0:
            times.append(curves.equal_batches_s())
    return statistics.fmean(times)


class _LearntCurves:
    def __init__(self, first: LoggedIteration) -> None:
        self._history = StepTimeHistory(len(first.batches))
        self._noise = np.full(len(first.batches), FIRST_NOISE)
        self._launch = LAUNCH_SHARE * np.array(first.compute_s)
        self._now = np.array(first.batches, float)
        self._seen = 0

    def add(self, iteration: LoggedIteration) -> None:
        self._now, seconds = np.array(iteration.batches, float), np.array(iteration.compute_s)
        self._history.add(self._now, seconds, seconds)
        self._seen += 1

    def t_star_s(self) -> float:
        """Return t* from lines fitted near the present batches; only the last `RECENT` iterations count."""
        self._history.restart(np.full(len(self._now), min(self._seen, RECENT)))
        unlimited = np.full(len(self._now), np.inf)
        return fluid_time(self._fit(self._now).lines, int(self._now.sum()), unlimited)

    def equal_batches_s(self) -> float:
        equal = equal_batches(int(self._now.sum()), [None] * len(self._now))
        return float(self._fit(np.array(equal, float)).seconds.max())

    def _fit(self, near: Values) -> Fit:
        return fit_lines(self._history, near, self._noise, self._launch)
