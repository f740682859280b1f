"""A group at work: who it is, what its ranks have said, and what it has come to."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hetctl.cluster.launchers.agents import Gpu
from hetctl.model.exit_reason import LOST_PEER, ExitReason
from hetctl.model.heartbeat import Heartbeat
from hetctl.model.plan import Placement
from hetctl.model.serialization import decode
from hetctl.runtime.agent.messages import Overuse
from hetctl.runtime.driver.exit_causes import CAUSES, with_peak
from hetctl.runtime.rank_logs import append, end_of
from hetctl.runtime.transport import Address
from hetctl.runtime.worker.messages import TaskMessage


@dataclass
class WorkerSlot:
    """The rank on one GPU.

    Parameters
    ----------
    step : str
        Name of the step whose agent forks it.
    ready : bool
        True once it was forked and waits for assignments.
    """

    gpu: Gpu
    step: str
    ready: bool = False


@dataclass(frozen=True)
class EndedGroup:
    """Result of a group.

    Parameters
    ----------
    name : str
        Of its task.
    exit_code : int
        128 + n if signal n ended it; of a group that failed, that of its first rank to fail.
    output : str
        The end of what its ranks and the launcher of their agents wrote.
    hung : bool
        Whether it was ended for want of a sign of life.
    lost_nodes : tuple of str
        Nodes whose agents were lost, and with them the group.
    signalled : bool
        Whether one of its ranks has got SIGTERM, and was to leave.
    overuse : Overuse or None
        Memory of a rank that its agent has ended for it.
    """

    name: str
    placement: tuple[Placement, ...]
    exit_code: int
    output: str
    hung: bool = False
    lost_nodes: tuple[str, ...] = ()
    signalled: bool = False
    overuse: Overuse | None = None

    @property
    def got_sigterm(self) -> bool:
        """True if SIGTERM made it leave, or ended it."""
        return self.signalled or self.exit_code == 128 + signal.SIGTERM

    def cause(self, why: ExitReason) -> str:
        """Say in words how it ended."""
        if why is ExitReason.OUT_OF_MEMORY and self.overuse:
            return _in_words(self.overuse)
        if why in CAUSES:
            return CAUSES[why]
        if self.exit_code > 128:
            return f"killed by {_signal_name(self.exit_code - 128)}"
        return f"exit code {self.exit_code}"


@dataclass
class RunningTask:
    """A group at work.

    Parameters
    ----------
    seats : list of Seat
        By rank.
    steps : tuple of str
        Names of the steps of agents that are its own: they end with it, and it ends with them.
    started_at : float
        Seconds since the epoch.
    heard : float
        When any of the ranks gave its last sign of life, by the monotonic clock, as all that follows.
    pulse : Heartbeat or None
        Last live metrics of its rank 0.
    stop : str or None
        Why it is to leave with a checkpoint, if it is.
    told, done, gone : set of int
        Ranks that know their assignment, have nothing to do any more, are no more.
    exit_code : int
        Of the first that was lost by itself.
    overuse : Overuse or None
        Memory of the first of its ranks that an agent has ended for it.
    said : str
        What the launcher wrote, of a group that was lost with agents.
    lost_nodes : dict of str to None
        Nodes whose agents were lost, in order.
    signalled : bool
        Whether one of its ranks has got SIGTERM, and is to leave.
    ending : float or None
        Since when the group is to end.
    killed : bool
        Whether what was left of it was killed after it had failed.
    """

    task: TaskMessage
    placement: tuple[Placement, ...]
    seats: list[WorkerSlot]
    steps: tuple[str, ...]
    key: str
    log_start: int
    started_at: float
    heard: float
    master: Address | None = None
    pulse: Heartbeat | None = None
    stop: str | None = None
    told: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    exit_code: int = 0
    overuse: Overuse | None = None
    said: str = ""
    lost_nodes: dict[str, None] = field(default_factory=dict)
    hung: bool = False
    signalled: bool = False
    ending: float | None = None
    killed: bool = False

    @property
    def over(self) -> bool:
        """True if nobody is at work any more."""
        return len(self.done | self.gone) == len(self.seats)

    @property
    def working(self) -> Iterator[WorkerSlot]:
        """The ranks that are."""
        return (s for rank, s in enumerate(self.seats) if rank not in self.done | self.gone)

    def hear(self, seat: WorkerSlot, message: Any) -> None:
        """Note what a rank says: a sign of life at least."""
        self.heard = time.monotonic()
        if "master" in message:
            self.master = decode(Address, message["master"])
        if "pulse" in message:
            self.pulse = decode(Heartbeat, message["pulse"])
        if "signalled" in message:
            self.signalled = True
        if "done" in message:
            self.done.add(self.seats.index(seat))

    def note_overuse(self, overuse: Overuse, who: str) -> None:
        """Note that the agent of a rank has ended it for its memory, in the log too; the first one stands."""
        self.overuse = self.overuse or overuse
        with suppress(OSError):
            append(self.task.log, f"{who} was ended: {_in_words(overuse)}\n")

    def lose(self, seat: WorkerSlot, exit_code: int, said: str = "", lost_node: str | None = None) -> None:
        """Note the end of a rank; one that was lost with another says nothing about the cause.

        Parameters
        ----------
        said : str
            Output of the launcher, if the rank was lost with its agent.
        lost_node : str or None
            Its node, if that is lost.
        """
        self.gone.add(self.seats.index(seat))
        self.said = said or self.said
        if lost_node is not None:
            self.lost_nodes[lost_node] = None
        if not self.exit_code or (self.exit_code == LOST_PEER and not self.killed):
            self.exit_code = exit_code or LOST_PEER
        self.end()

    def end(self) -> None:
        """Let the group end; those that have not been told what to do need not even begin."""
        self.ending = self.ending or time.monotonic()
        self.done |= set(range(len(self.seats))) - self.told

    def ended(self) -> EndedGroup:
        """Return what it has come to; if its ranks said nothing, what launchers said goes to its log."""
        output = end_of(self.task.log, self.log_start)
        if self.said and not output:
            append(self.task.log, self.said)
        return EndedGroup(
            *(self.task.name, self.placement, self.exit_code, self.said + output, self.hung),
            tuple(self.lost_nodes),
            self.signalled,
            self.overuse,
        )


def _in_words(overuse: Overuse) -> str:
    return with_peak(CAUSES[ExitReason.OUT_OF_MEMORY], overuse.peak, overuse.share)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
