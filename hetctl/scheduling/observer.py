"""Knowledge that the scheduling of a job has from outside; the driver and the simulator each provide it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from hetctl.model.plan import Allocation
from hetctl.model.site import Node
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Held
from hetctl.scheduling.rounds import Running


class ObservedMembers(Protocol):
    """The members of a run at one moment."""

    @property
    def left(self) -> Mapping[str, Workload]:
        """All that need training, with what they have left by their finished epochs alone."""

    @property
    def waiting(self) -> Sequence[Workload]:
        """Those that hold no GPU, in the planner's order."""

    @property
    def held(self) -> tuple[Held, ...]:
        """Those in training that were not told to leave, with what they are likely to have left."""


class Observer(Protocol):
    """Knowledge of members, and of GPUs that cannot be used just now."""

    def left(self, now_s: float) -> Mapping[str, Workload]:
        """Return `Seen.left`."""

    def seen(self, now_s: float, running: Mapping[str, Running], deferred: Set[str]) -> ObservedMembers:
        """Return all members as a planner may know them; of those that wait, without `deferred`."""

    def usable(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return nodes with those of their free GPUs that a group can use now."""

    def can_use(self, allocation: Allocation) -> bool:
        """Return true if a group can use all of these GPUs now."""

    def used_up(self) -> str | None:
        """Return the limit on the whole run that forbids another round, or None."""
