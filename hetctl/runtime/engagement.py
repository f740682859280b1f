"""A group at work: who it is, what its ranks have said, and what it has come to."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hetctl.control.ends import CAUSES
from hetctl.core.codec import decode
from hetctl.core.ends import LOST_PEER, Why
from hetctl.core.plan import Allocation
from hetctl.launchers.seats import Gpu
from hetctl.runtime.assignment import Task
from hetctl.runtime.steps import EndedStep, append, end_of
from hetctl.runtime.wire import Address, Wire


@dataclass
class Seat:
    """The rank on one GPU.

    Parameters
    ----------
    wire : Wire or None
        None until it has started.
    lost : bool
        Whether it has hung up: its step is about to end.
    """

    gpu: Gpu
    name: str
    wire: Wire | None = None
    lost: bool = False


@dataclass(frozen=True)
class EndedGroup:
    """What a group has come to.

    Parameters
    ----------
    name : str
        Of its task.
    exit_code : int
        128 + n if signal n ended it; of a group that failed, that of its first rank to fail.
    output : str
        The end of what its ranks and their launchers wrote.
    hung : bool
        Whether it was ended for want of a sign of life.
    """

    name: str
    allocation: Allocation
    exit_code: int
    output: str
    hung: bool = False

    def cause(self, why: Why) -> str:
        """Say in words how it ended."""
        if why in CAUSES:
            return CAUSES[why]
        if self.exit_code > 128:
            return f"killed by {_signal_name(self.exit_code - 128)}"
        return f"exit code {self.exit_code}"


@dataclass
class Engagement:
    """A group at work.

    Parameters
    ----------
    seats : list of Seat
        By rank.
    engaged_at : float
        Seconds since the epoch.
    heard : float
        When any of the ranks gave its last sign of life, by the monotonic clock, as all that follows.
    told, done, gone : set of int
        Ranks that know their assignment, have nothing to do any more, are no more.
    exit_code : int
        Of the first that was lost by itself.
    said : str
        What the steps of lost ranks wrote.
    ending : float or None
        Since when the group is to end.
    """

    task: Task
    allocation: Allocation
    seats: list[Seat]
    key: str
    log_start: int
    engaged_at: float
    heard: float
    master: Address | None = None
    told: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    exit_code: int = 0
    said: str = ""
    hung: bool = False
    ending: float | None = None
    warned: bool = False

    @property
    def over(self) -> bool:
        """Whether nobody is at work any more."""
        return len(self.done | self.gone) == len(self.seats)

    @property
    def working(self) -> Iterator[Seat]:
        """The ranks that are."""
        return (s for rank, s in enumerate(self.seats) if rank not in self.done | self.gone)

    def hear(self, seat: Seat, message: Any) -> None:
        """Note what a rank says: a sign of life at least."""
        self.heard = time.monotonic()
        if "master" in message:
            self.master = decode(Address, message["master"])
        if "done" in message:
            self.done.add(self.seats.index(seat))

    def lose(self, seat: Seat, step: EndedStep) -> None:
        """Note the end of a rank; one that was lost with another says nothing about the cause."""
        self.gone.add(self.seats.index(seat))
        self.said += step.output
        if not self.exit_code or (self.exit_code == LOST_PEER and not self.warned):
            self.exit_code = step.exit_code or LOST_PEER
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
        return EndedGroup(self.task.name, self.allocation, self.exit_code, self.said + output, self.hung)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
