"""A round with steps that are still running: who is in it, who was told to leave, and since when."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetctl.control.ends import why_ended, with_peak
from hetctl.core.ends import FAULTS, IN_ORDER, Why
from hetctl.core.events import Event, EventWriter, read_events
from hetctl.core.layout import RoundFolder
from hetctl.core.plan import Allocation
from hetctl.runtime.engagement import EndedGroup
from hetctl.runtime.steady import write_stop

DEADLINE = "deadline"
LAST_WORDS = {"converged": Why.FINISHED, "stopped": Why.TOLD}
"""The event that a trainer ends with when all is well."""


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
            write_stop(self.folder.stop, reason)

    def stop_member(self, name: str, reason: str, busy_s: Mapping[str, float]) -> None:
        """Ask one member's trainers to checkpoint and leave."""
        self._expect(name, busy_s)
        self.reasons[name] = reason
        write_stop(self.folder.stop_of(name), reason)

    def _expect(self, name: str, busy_s: Mapping[str, float]) -> None:
        since = time.time() + busy_s.get(name, 0.0)
        self.leaving[name] = min(since, self.leaving.get(name, since))

    def overdue(self) -> Iterator[tuple[str, float]]:
        """Return the members that are waited for, and for how many seconds."""
        now = time.time()
        return ((name, now - since) for name, since in self.leaving.items() if name in self.active)

    def close(self, step: EndedGroup, profiled_peak: int) -> Why:
        """Report a step that has ended, and why.

        Parameters
        ----------
        profiled_peak : int
            Bytes of memory that the member needs as far as one knows, if its trainer cannot tell any more.
        """
        del self.active[step.name]
        said = list(read_events(self.folder.events_of(step.name)))
        why = self._why(step, said)
        cause = step.cause(why)
        if why is Why.OUT_OF_MEMORY:
            cause = with_peak(cause, _last(said, "peak_memory_bytes") or profiled_peak)
        if why not in IN_ORDER:
            del self.held[step.name]
            self.failed = True
        self.events.write(
            "step_ended",
            member=step.name,
            exit_code=step.exit_code,
            why=why.value,
            cause=cause,
            fault=why in FAULTS,
        )
        return why

    def _why(self, step: EndedGroup, said: Sequence[Event]) -> Why:
        """Say why a step ended; whoever was told to leave may also be killed on the way."""
        if step.hung:
            return Why.HUNG
        if step.name in self.terminated:
            return Why.TOLD
        if step.exit_code == 0 and (done := [e.kind for e in said if e.kind in LAST_WORDS]):
            return LAST_WORDS[done[-1]]
        why = why_ended(step.exit_code, step.output, _last(said, "why"))
        return Why.TOLD if why is Why.KILLED and step.name in self.leaving else why

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


def _last(events: Sequence[Event], key: str) -> Any:
    """Return the last value of that name in a member's events."""
    return next((event.data[key] for event in reversed(events) if key in event.data), None)
