"""Interface to the state of members and GPUs; the driver and the simulator each implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from hetctl.model.plan import Allocation
from hetctl.model.site import Node
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Held
from hetctl.scheduling.rounds import RunningTask


class ObservedMembers(Protocol):
    """Members of a run at one moment."""

    @property
    def left(self) -> Mapping[str, Workload]:
        """All members that need training, with the work left after their finished epochs."""

    @property
    def waiting(self) -> Sequence[Workload]:
        """Members without GPUs, in the planner's order."""

    @property
    def held(self) -> tuple[Held, ...]:
        """Members in training that were not stopped, with the work that they are likely to have left."""


class Observer(Protocol):
    """State of the members, and of GPUs that cannot be used at present."""

    def left(self, now_s: float) -> Mapping[str, Workload]:
        """Return the members that need training, by name, as `ObservedMembers.left`."""

    def seen(self, now_s: float, running: Mapping[str, RunningTask], deferred: Set[str]) -> ObservedMembers:
        """Return all members as the planner may see them, without the waiting ones in `deferred`."""

    def usable(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return nodes with those free GPUs that a group can use now."""

    def can_use(self, allocation: Allocation) -> bool:
        """Return true if a group can use all of these GPUs now."""

    def used_up(self) -> str | None:
        """Return the limit on the whole run that forbids another round, or None."""
