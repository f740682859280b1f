"""Interface to the state of members; the driver and the simulator each implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from hetctl.model.workload import Workload
from hetctl.scheduling.job_scheduler import RunningTask
from hetctl.scheduling.planners.base import Held


@dataclass(frozen=True)
class ObservedMembers:
    """Members of a run at one moment.

    Parameters
    ----------
    left : mapping of str to Workload
        All members that need training, with the work left after their finished epochs.
    waiting : sequence of Workload
        Members without GPUs, in the planner's order.
    held : tuple of Held
        Members in training that were not stopped, with the work that they are likely to have left.
    """

    left: Mapping[str, Workload]
    waiting: Sequence[Workload]
    held: tuple[Held, ...]


class Observer(Protocol):
    """State of the members."""

    def left(self, now_s: float) -> Mapping[str, Workload]:
        """Return the members that need training, by name, as `ObservedMembers.left`."""

    def seen(self, now_s: float, running: Mapping[str, RunningTask], deferred: Set[str]) -> ObservedMembers:
        """Return all members as the planner may see them, without the waiting ones in `deferred`."""

    def used_up(self) -> str | None:
        """Return the limit on the whole run that forbids another round, or None."""
