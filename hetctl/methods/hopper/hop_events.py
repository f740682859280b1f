"""Events and commands of a job in which members hop, beside those of `hetctl.scheduling`.

Times are in seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetctl.model.ensemble import Member


@dataclass(frozen=True)
class HopProgress:
    """Progress of a member in its newest checkpoint.

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
class StoreOpened:
    """Report of a node's agent: states can be stored there.

    Parameters
    ----------
    partitions : frozenset of int
        Numbers of the partitions that exist on the node.
    """

    now_s: float
    node: str
    partitions: frozenset[int]


@dataclass(frozen=True, slots=True)
class StoreLost:
    """Loss of a node's store with its agent; the next agent is there, and opens an empty one."""

    now_s: float
    node: str


@dataclass(frozen=True, slots=True)
class VisitDone:
    """End of a visit whose new state is in the store of its worker's node; the end of its task follows.

    Parameters
    ----------
    number : int
        Number of the visit.
    state : str
        Name of the new state.
    metrics : mapping of str to float or None
        Results of the epoch after its last evaluation; None before.
    """

    now_s: float
    member: str
    number: int
    state: str
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class StateFetched:
    """End of a transfer between two stores; `error` is empty if the state is there now."""

    now_s: float
    node: str
    state: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class StateWritten:
    """Checkpoint of the state after a visit, complete on the disk."""

    now_s: float
    member: str
    number: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """End of a rank between two visits; checkpoints that it had still to write are lost."""

    now_s: float
    worker: str


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """Request of a search for a trial, between two epochs; no visit of it runs."""

    now_s: float
    progress: HopProgress


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
