"""Who takes how many samples next: the shape of every manager of batches (LB-BSP, Algorithm 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.balance.step_time import check_room
from hetctl.model.errors import BadInputError, InfeasibleError

FULL_MEMORY = 0.95
"""A worker that uses more of its memory than this is given no larger batch (section 3.3.2)."""


@dataclass(frozen=True)
class Observation:
    """What a worker tells at the end of an iteration.

    Parameters
    ----------
    batch : int
        Samples that it took, x_i.
    seconds : float
        That it worked on them, t_i, without waiting for others.
    cpu : float
        Share of the processors that it could use, c_i.
    memory : float
        Share of its memory in use, m_i; 0 where it is not known.

    Raises
    ------
    BadInputError
        If the batch is below 1, the seconds are not finite and above 0, or the memory not from 0 up.
    """

    batch: int
    seconds: float
    cpu: float = 1.0
    memory: float = 0.0

    def __post_init__(self) -> None:
        if self.batch < 1 or not (math.isfinite(self.seconds) and self.seconds > 0):
            raise BadInputError(
                f"{self.batch} samples in {self.seconds} s: an iteration takes 1 sample or more, and time"
            )
        if not 0 <= self.memory < math.inf:
            raise BadInputError(f"memory is {self.memory}, but must be the share in use, from 0 up")


class StragglerWarning(NamedTuple):
    """What a person should know of a worker, by its number: a sentence that lacks its subject."""

    worker: int
    what: str


class BatchSizeManager(Protocol):
    """Splits one total batch over the workers, anew at the end of each iteration.

    The sum of the batches never changes, each is at least 1, and none is above its cap. A manager has no
    clock and no file, so that its pickle is all it takes to go on with the next job.
    """

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch of each worker in the next iteration."""

    @property
    def warnings(self) -> tuple[StragglerWarning, ...]:
        """What a person should know, each once, in the order in which it came up."""

    def update(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Take in the last iteration, one observation by worker; return the next batches."""


def equal_batches(total: int, caps: Sequence[int | None]) -> tuple[int, ...]:
    """Return the batches of plain BSP, as equal as whole numbers and caps allow.

    Parameters
    ----------
    caps : sequence of int or None
        The largest batch of each worker; None: any.

    Raises
    ------
    BadInputError
        If there are fewer samples than workers.
    InfeasibleError
        If the caps leave no room for all samples.
    """
    limits = limits_of(caps)
    check_room(total, limits)
    shares = np.zeros(len(caps), dtype=int)
    while left := total - int(shares.sum()):
        open_workers = np.flatnonzero(shares < limits)
        part = max(left // len(open_workers), 1)
        for worker in open_workers[:left]:
            shares[worker] = min(shares[worker] + part, limits[worker])
    return tuple(shares.tolist())


def limits_of(caps: Sequence[int | None]) -> NDArray[np.float64]:
    """Return the caps as numbers, infinite where there is none."""
    return np.array([math.inf if cap is None else cap for cap in caps], dtype=float)


def checked_limits(batches: Sequence[int], caps: Sequence[int | None]) -> NDArray[np.float64]:
    """Return the caps as numbers for these first batches; no caps at all means none for anybody.

    Raises
    ------
    BadInputError
        If there is no worker, a batch is below 1, or there are not as many caps as batches.
    InfeasibleError
        If a batch is above its cap.
    """
    if not batches or min(batches) < 1 or (caps and len(caps) != len(batches)):
        raise BadInputError(f"first batches {list(batches)} with caps {list(caps)}: one of each, from 1 up")
    limits = limits_of(caps or [None] * len(batches))
    if (np.array(batches) > limits).any():
        raise InfeasibleError(f"first batches {list(batches)} are above their caps {list(caps)}")
    return limits
