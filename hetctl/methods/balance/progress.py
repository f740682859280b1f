"""Course of the balancing of a real run: batches and times, t*, and what was gained."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from hetctl.methods.balance.batch_partition import Values, fluid_time
from hetctl.methods.balance.curve_manager import FIRST_NOISE, LAUNCH_SHARE
from hetctl.methods.balance.manager import equal_batches
from hetctl.methods.balance.observation_log import LoggedIteration
from hetctl.methods.balance.step_time_fit import RECENT, Fit, StepTimeHistory, fit_lines
from hetctl.model.run_status import BalanceCourse, BalancePoint

POINTS = 200
"""Most points of a course: means over as many iterations as needed."""


def course_of(member: str, workers: tuple[str, ...], iterations: Sequence[LoggedIteration]) -> BalanceCourse:
    """Return the course of a member's balancing; `iterations` must not be empty."""
    stride = -(-len(iterations) // POINTS)
    curves = _LearntCurves(iterations[0])
    points = []
    for first in range(0, len(iterations), stride):
        part = iterations[first : first + stride]
        for one in part:
            curves.add(one)
        points.append(BalancePoint(part[-1].time, part[-1].batches, iteration_s(part), curves.t_star_s()))
    measured_s, equal_s = iteration_s(iterations), equal_batches_s(iterations)
    return BalanceCourse(member, workers, tuple(points), measured_s, equal_s)


def iteration_s(iterations: Sequence[LoggedIteration]) -> float:
    """Return the mean time in seconds of the slowest worker."""
    return statistics.fmean(max(one.seconds) for one in iterations)


def equal_batches_s(iterations: Sequence[LoggedIteration]) -> float:
    """Return the mean time that the slowest worker would have taken with equal batches, in seconds.

    Each worker's time is that of a line fitted to what it took with the batches that it had.
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
    """Time curves of all workers, from the iterations so far."""

    def __init__(self, first: LoggedIteration) -> None:
        self._history = StepTimeHistory(len(first.batches))
        self._noise = np.full(len(first.batches), FIRST_NOISE)
        self._launch = LAUNCH_SHARE * np.array(first.seconds)
        self._now = np.array(first.batches, float)
        self._seen = 0

    def add(self, iteration: LoggedIteration) -> None:
        self._now, seconds = np.array(iteration.batches, float), np.array(iteration.seconds)
        self._history.add(self._now, seconds, seconds)
        self._seen += 1

    def t_star_s(self) -> float:
        """Return t* of lines fitted near the present batches; only the last `RECENT` iterations count."""
        self._history.restart(np.full(len(self._now), min(self._seen, RECENT)))
        unlimited = np.full(len(self._now), np.inf)
        return fluid_time(self._fit(self._now).lines, int(self._now.sum()), unlimited)

    def equal_batches_s(self) -> float:
        equal = equal_batches(int(self._now.sum()), [None] * len(self._now))
        return float(self._fit(np.array(equal, float)).seconds.max())

    def _fit(self, near: Values) -> Fit:
        return fit_lines(self._history, near, self._noise, self._launch)
