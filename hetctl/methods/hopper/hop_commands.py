"""Commands of the core of hops, beside those of `hetctl.scheduling.commands`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetctl.model.hops import Visit


@dataclass(frozen=True, slots=True)
class OpenHops:
    """Command to open the round in which all visits of the job take place."""

    round: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartVisit:
    """Command to start a visit on its worker.

    Parameters
    ----------
    state : str or None
        Name of the state from which it starts; it is or arrives in the store of the worker's node. None: the
        newest checkpoint, or a fresh network.
    checkpoint : int
        Number of the newest visit in that checkpoint; -1 if no visit is in it.
    """

    round: int
    visit: Visit
    state: str | None
    checkpoint: int = -1


@dataclass(frozen=True, slots=True)
class FetchState:
    """Command to copy a state from the store of the node `source` to that of `node`."""

    node: str
    state: str
    source: str


@dataclass(frozen=True, slots=True)
class ForgetStates:
    """Command to delete states that no visit needs any more."""

    nodes: tuple[str, ...]
    states: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UndoVisits:
    """Command to record that visits count no more: their states were lost before they were in a checkpoint.

    Parameters
    ----------
    numbers : tuple of int
        Numbers of the visits.
    """

    member: str
    numbers: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Converge:
    """Command to record that a member has converged; its last state is in a checkpoint."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReportPlan:
    """Command to record a new plan of visits.

    Parameters
    ----------
    predicted_s, lower_bound_s : float
        Predicted time of the planned visits, and its lower bound, in seconds from now.
    workers : mapping of str to tuple of str
        Partitions by worker.
    reason : str
        Change that required the plan.
    """

    scheduler: str
    predicted_s: float
    lower_bound_s: float
    workers: Mapping[str, tuple[str, ...]]
    reason: str


HopCommand = OpenHops | StartVisit | FetchState | ForgetStates | UndoVisits | Converge | ReportPlan
