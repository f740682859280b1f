"""Commands of a job in which members hop, beside those of `hetctl.scheduling`, their progress and states."""

from __future__ import annotations

from dataclasses import field

from hetctl.model.ensemble import Member
from hetctl.model.hops import Visit, node_of, slots_in
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


@dataclass
class MemberStates:
    """The newest state of a member, and what has happened since its newest checkpoint.

    Parameters
    ----------
    state : str or None
        Name of the newest state; None: that of the newest checkpoint, or a fresh network.
    number, saved_number : int
        Number of the visit that ended with this state, and of the one that ended with that of the newest
        checkpoint; -1: none.
    nodes : set of str
        Nodes whose stores have the state.
    coming : set of str
        Nodes to which it is being copied.
    writer : str or None
        GPU, as a worker, whose rank writes the checkpoint of this state: the first of a group. None: it is
        written, or lost with its rank.
    unsaved : list of Visit
        Visits since the newest checkpoint, oldest first.
    failures : int
        Number of copies of the state that have failed.
    """

    state: str | None = None
    number: int = -1
    saved_number: int = -1
    nodes: set[str] = field(default_factory=set)
    coming: set[str] = field(default_factory=set)
    writer: str | None = None
    unsaved: list[Visit] = field(default_factory=list)
    failures: int = 0

    @property
    def is_saved(self) -> bool:
        """True if the newest state is in a checkpoint."""
        return not self.unsaved

    @property
    def is_lost(self) -> bool:
        """True if no store has the newest state any more."""
        return self.state is not None and not self.nodes

    def renew(self, visit: Visit) -> set[str]:
        """Record a visit's new state; return the nodes that had the old one."""
        had = self.nodes | self.coming
        self.state, self.number, self.writer = visit.new_state, visit.number, slots_in(visit.worker)[0]
        self.nodes, self.coming, self.failures = {node_of(visit.worker)}, set(), 0
        self.unsaved.append(visit)
        return had

    def saved(self, number: int) -> None:
        """Record a checkpoint of the state after a visit."""
        numbers = [visit.number for visit in self.unsaved]
        if number in numbers:
            del self.unsaved[: numbers.index(number) + 1]
            self.saved_number = number
        if number == self.number:
            self.writer = None

    def roll_back(self) -> list[Visit]:
        """Return to the newest checkpoint; return the visits that this undoes."""
        undone, self.unsaved = self.unsaved, []
        self.state, self.number, self.writer = None, self.saved_number, None
        self.nodes, self.coming, self.failures = set(), set(), 0
        return undone

    def drop_node(self, node: str) -> None:
        """Record the loss of a node with its store."""
        self.nodes.discard(node)
        self.coming.discard(node)
