"""Hops of a run for display: where its members are, how busy its workers are, and what was predicted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HopMember:
    """Position of a member that hops.

    Parameters
    ----------
    epoch : int
        Present epoch, from 1.
    evaluating : bool
        True if all training visits of that epoch are done.
    visited : int
        Partitions visited so far in the present pass of training or evaluation visits.
    worker : str or None
        Worker of its present visit, or of the last one; None before the first.
    visits, repeated : int
        Visits that are done, and those that were lost or undone.
    """

    member: str
    epoch: int
    evaluating: bool
    visited: int
    partitions: int
    worker: str | None
    visits: int
    repeated: int


@dataclass(frozen=True)
class HopWorkerUse:
    """Use of a worker, a GPU, while jobs had visits to make.

    Parameters
    ----------
    visits, repeated : int
        Visits that are done, and those that were lost or undone.
    busy, waiting : float
        Shares of the time in visits that are done: in which it worked, and in which it waited for a state.
    hop_s : float or None
        Mean time of a transfer from another node in seconds; None if there was none.
    """

    worker: str
    visits: int
    repeated: int
    busy: float
    waiting: float
    hop_s: float | None


@dataclass(frozen=True)
class HopForecast:
    """Plan of visits, and what came of it.

    Parameters
    ----------
    start_s : float
        Time of the plan in seconds from the run's start.
    reason : str
        Change that required it.
    predicted_s, lower_bound_s : float
        Predicted time of the planned visits and its lower bound, in seconds from the plan.
    measured_s : float or None
        Seconds from the plan to the end of its job's last visit so far; None if none has ended since.
    """

    start_s: float
    scheduler: str
    reason: str
    workers: int
    predicted_s: float
    lower_bound_s: float
    measured_s: float | None


@dataclass(frozen=True)
class HopSpan:
    """Visit in seconds from the run's start.

    Parameters
    ----------
    done : bool
        False if it was lost or undone.
    """

    member: str
    worker: str
    epoch: int
    evaluates: bool
    partition: int
    start_s: float
    end_s: float
    done: bool


@dataclass(frozen=True)
class HopStatus:
    """Hops of a run.

    Parameters
    ----------
    visits, lost, undone : int
        Visits of all members by their state.
    members : tuple of HopMember
        Members to be shown.
    spans : tuple of HopSpan
        All visits in the order of their starts, if requested.
    """

    partitions: int
    visits: int
    lost: int
    undone: int
    members: tuple[HopMember, ...]
    workers: tuple[HopWorkerUse, ...]
    plans: tuple[HopForecast, ...]
    spans: tuple[HopSpan, ...] = ()
