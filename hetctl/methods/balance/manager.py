"""Interface of batch size managers (LB-BSP, Algorithm 3), and the drift upon which balancing begins."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from hetctl.methods.balance.predictors.learner import Learner
from hetctl.methods.balance.step_time import cap_limits, check_room
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.values import dataclass

FULL_MEMORY = 0.95
"""Share of memory above which a worker gets no larger batch (section 3.3.2)."""


@dataclass(frozen=True)
class Observation:
    """Measurement of a worker after an iteration.

    Parameters
    ----------
    batch : int
        Samples in its batch, x_i.
    seconds : float
        Computation time t_i in seconds, without waiting for other workers.
    cpu : float
        Share of the processors that it can use, c_i.
    memory : float
        Share of its memory in use, m_i; 0 if unknown.

    Raises
    ------
    BadInputError
        If the batch is below 1, the time is no finite number above 0, or another value is no finite share.
    """

    batch: int
    seconds: float
    cpu: float = 1.0
    memory: float = 0.0

    def __post_init__(self) -> None:
        if self.batch < 1 or not (math.isfinite(self.seconds) and self.seconds > 0):
            raise BadInputError(
                f"{self.batch} samples in {self.seconds} s: must be at least 1 sample and a time above 0"
            )
        for name, share in (("cpu", self.cpu), ("memory", self.memory)):
            if not 0 <= share < math.inf:
                raise BadInputError(f"{name} is {share}, but must be a share, from 0 up")


class StragglerWarning(NamedTuple):
    """Warning about a worker by number; `what` is a sentence without its subject."""

    worker: int
    what: str


class BatchSizeManager(ABC):
    """Manager that splits a constant total batch over the workers, anew after each iteration.

    The sum of the batches is constant, each is at least 1, and none exceeds its cap. A manager has no clock
    and no file: its `dump_state` suffices to continue in the next job.

    Parameters
    ----------
    batches : sequence of int
        Batches of the first iteration; their sum is kept.
    caps : sequence of int or None
        Largest batch of each worker, None for no cap; empty if no worker has one.

    Attributes
    ----------
    batches : tuple of int
        Batch of each worker in the next iteration.
    warnings : tuple of StragglerWarning
        Warnings for the user, each once, in order.

    Raises
    ------
    BadInputError
        If there is no worker, a batch is below 1, or the numbers of caps and batches differ.
    InfeasibleError
        If a batch is above its cap.
    """

    def __init__(self, batches: Sequence[int], caps: Sequence[int | None] = ()) -> None:
        if not batches or min(batches) < 1 or (caps and len(caps) != len(batches)):
            raise BadInputError(
                f"first batches {list(batches)} with caps {list(caps)}: each worker needs one of each, "
                "at least 1"
            )
        self._limits = cap_limits(caps or [None] * len(batches))
        if (np.array(batches) > self._limits).any():
            raise InfeasibleError(f"first batches {list(batches)} are above their caps {list(caps)}")
        self.batches = tuple(batches)
        self.warnings: tuple[StragglerWarning, ...] = ()

    @property
    def learner(self) -> Learner | None:
        """Predictor with networks that the owner trains between updates; None if there is none."""
        return None

    @abstractmethod
    def update(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Add the last iteration, one observation per worker; return the next batches."""

    def _warn(self, worker: int, what: str) -> None:
        warning = StragglerWarning(worker, f"{what}: training is faster without it")
        if warning not in self.warnings:
            self.warnings += (warning,)


def equal_batches(total: int, caps: Sequence[int | None]) -> tuple[int, ...]:
    """Return the batches of plain BSP, as equal as integers and caps allow.

    Parameters
    ----------
    caps : sequence of int or None
        Largest batch of each worker; None for no cap.

    Raises
    ------
    BadInputError
        If there are fewer samples than workers.
    InfeasibleError
        If the sum of the caps is below `total`.
    """
    limits = cap_limits(caps)
    check_room(total, limits)
    shares = np.zeros(len(caps), dtype=int)
    while left := total - int(shares.sum()):
        open_workers = np.flatnonzero(shares < limits)
        part = max(left // len(open_workers), 1)
        for worker in open_workers[:left]:
            shares[worker] = min(shares[worker] + part, limits[worker])
    return tuple(shares.tolist())


LIMIT = 1.10
"""Ratio of the slowest to the fastest worker's time beyond which balancing begins."""
WINDOW = 16
"""Number of iterations compared by their medians, which resist single outliers."""
LASTING = 3
"""Successive windows in which the same worker has to exceed the limit."""
SURE = 3.0
"""Least distance of the worker as well, in standard errors of the difference of two medians."""
DEVIATIONS_PER_MAD = 1.4826
"""Standard deviations in a median absolute deviation, for normal noise."""
ERROR_OF_DIFFERENCE = math.sqrt(math.pi / 2 * 2 / WINDOW)
"""Standard error of the difference of two medians of a window, in standard deviations of a time."""


class DriftDetector:
    """Comparison of the times of workers with equal batches, once per `WINDOW` of iterations.

    A common slowdown of all workers does not count. Nor does noise: eight equal workers with times that vary
    by 10 % pass for unequal ones twice in a million iterations.

    Parameters
    ----------
    workers : int
        Number of workers.
    """

    def __init__(self, workers: int) -> None:
        self._workers = range(workers)
        self._window: list[list[float]] = []
        self._slow: list[set[int]] = []

    def observe(self, seconds: Sequence[float]) -> bool:
        """Add the times of an iteration; return true if the workers have drifted apart.

        Parameters
        ----------
        seconds : sequence of float
            Computation time by worker, without waiting for others.
        """
        # Slowdowns are factors; their logarithms are differences.
        self._window.append([math.log(own) for own in seconds])
        if len(self._window) < WINDOW:
            return False
        self._slow = [*self._slow, self._slow_workers()][-LASTING:]
        self._window.clear()
        return len(self._slow) == LASTING and bool(set.intersection(*self._slow))

    def _slow_workers(self) -> set[int]:
        """Return the workers whose time in this window exceeds the fastest worker's by the limit."""
        medians = [median(iteration[worker] for iteration in self._window) for worker in self._workers]
        residuals = (abs(own - medians[w]) for iteration in self._window for w, own in enumerate(iteration))
        noise = DEVIATIONS_PER_MAD * median(residuals)
        limit = min(medians) + max(math.log(LIMIT), SURE * ERROR_OF_DIFFERENCE * noise)
        return {worker for worker, own in enumerate(medians) if own > limit}
