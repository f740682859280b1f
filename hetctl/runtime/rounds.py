"""A round with steps that are still running: who is in it, who was told to leave, and since when."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from hetctl.core.events import EventWriter, read_events
from hetctl.core.layout import RoundFolder, write_private
from hetctl.core.plan import Allocation
from hetctl.runtime.steps import EndedStep

DEADLINE = "deadline"


@dataclass
class OpenRound:
    """A round with steps that are still running.

    Parameters
    ----------
    allocated : int
        GPUs that the round was given.
    opened_at : float
        Seconds since the epoch.
    active : dict
        Members whose steps run.
    held : dict
        GPUs by member; a member whose step failed holds none.
    leaving : dict
        Members that were told to leave, and the time from which on they are waited for.
    reasons : dict
        Why, of those that were told each for itself.
    terminated : set
        Members that had to be made to leave.
    """

    folder: RoundFolder
    events: EventWriter
    allocated: int
    opened_at: float
    active: dict[str, Allocation] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    leaving: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    terminated: set[str] = field(default_factory=set)
    stopped_by: str | None = None
    failed: bool = False

    def stop(self, reason: str, busy_s: Mapping[str, float]) -> None:
        """Ask the trainers to checkpoint and leave; the first reason stands.

        Parameters
        ----------
        busy_s : mapping of str to float
            For how long members may be busy before they see it; those that are not in it are waited
            for from now on.
        """
        for name in self.active:
            self._expect(name, busy_s)
        if self.stopped_by is None:
            self.stopped_by = reason
            write_private(self.folder.stop, reason + "\n")

    def stop_member(self, name: str, reason: str, busy_s: Mapping[str, float]) -> None:
        """Ask one member's trainers to checkpoint and leave."""
        self._expect(name, busy_s)
        self.reasons[name] = reason
        write_private(self.folder.stop_of(name), reason + "\n")

    def _expect(self, name: str, busy_s: Mapping[str, float]) -> None:
        since = time.time() + busy_s.get(name, 0.0)
        self.leaving[name] = min(since, self.leaving.get(name, since))

    def overdue(self) -> Iterator[tuple[str, float]]:
        """Return the members that are waited for, and for how many seconds."""
        now = time.time()
        return ((name, now - since) for name, since in self.leaving.items() if name in self.active)

    def close(self, step: EndedStep) -> bool:
        """Report a step that has ended; return whether that is held against the member."""
        del self.active[step.name]
        fault = step.exit_code != 0 and step.name not in self.terminated
        if fault:
            del self.held[step.name]
            self.failed = True
        self.events.write(
            "step_ended", member=step.name, exit_code=step.exit_code, cause=step.cause, fault=fault
        )
        return fault

    def end(self, left: Collection[str]) -> None:
        """Report the end of the round.

        Parameters
        ----------
        left : collection of str
            Members that still need training.
        """
        self.events.write("round_ended", ended_by=self.stopped_by or self._ended_by(left))

    def _ended_by(self, left: Collection[str]) -> str:
        """Say why a round ended that nobody stopped: trainers see the deadline for themselves."""
        if self.failed:
            return "failed"
        reasons = [self.reasons.get(name, DEADLINE) for name in self.held if name in left]
        return reasons[-1] if reasons else "converged"

    def had_no_room(self, member: str) -> bool:
        """Whether a trainer left since its next epoch, as measured, would not fit before the deadline."""
        events = read_events(self.folder.events_of(member))
        return any(event.kind == "stopped" and event.data["reason"] == DEADLINE for event in events)
