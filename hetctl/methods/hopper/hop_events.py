"""Commands of a job in which members hop, beside those of `hetctl.scheduling`, and their progress."""

from __future__ import annotations

from hetctl.model.ensemble import Member
from hetctl.model.values import dataclass


@dataclass(frozen=True)
class HopProgress:
    """Progress of a member in its newest checkpoint; as an event, the member hops from now on.

    Parameters
    ----------
    history : tuple of float
        The stop rule's metric after each finished epoch.
    evaluating : bool
        True if all training visits of the present epoch are done.
    visited : tuple of int
        Partitions that are done in the present pass: of training visits, or of evaluation visits.
    visit : int
        Number of the newest visit in the checkpoint; -1 if there is none.
    """

    member: Member
    history: tuple[float, ...] = ()
    evaluating: bool = False
    visited: tuple[int, ...] = ()
    visit: int = -1


@dataclass(frozen=True, slots=True)
class OpenHops:
    """Command to open the round in which all visits of the job take place."""

    round: int
    members: tuple[str, ...]


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
