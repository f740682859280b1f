"""View of a run for the scheduling of its job: the members' work, free GPUs, and the budget."""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from hetctl.model.plan import Allocation
from hetctl.model.run import Budget
from hetctl.model.site import Node
from hetctl.model.workload import Workload
from hetctl.runtime.driver.active_round import ActiveRound
from hetctl.runtime.driver.run_members import RunMembers, RunObservation
from hetctl.runtime.driver.worker_pool import WorkerPool
from hetctl.scheduling.budget import exceeded
from hetctl.scheduling.rounds import Running


@dataclass(frozen=True)
class RunObserver:
    """State of the run as its events show it (`hetctl.scheduling.observer.Observer`).

    Parameters
    ----------
    open_rounds : mapping of int to ActiveRound
        Running rounds by index; the mapping changes as rounds start and end.
    order : callable
        Sort key of waiting workloads.
    """

    budget: Budget
    members: RunMembers
    workers: WorkerPool
    open_rounds: Mapping[int, ActiveRound]
    order: Any

    def left(self, _now_s: float) -> Mapping[str, Workload]:
        """Return all members that need training, by their finished epochs and checkpoints."""
        return self.members.left()

    def seen(self, _now_s: float, _running: Mapping[str, Running], deferred: Set[str]) -> RunObservation:
        """Return all members; waiting ones are in the planner's order and exclude `deferred`."""
        seen = self.members.seen(self.open_rounds.values(), time.time())
        waiting = (workload for workload in seen.waiting if workload.name not in deferred)
        return replace(seen, waiting=tuple(sorted(waiting, key=self.order)))

    def usable(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the nodes with their free GPUs; GPUs of ranks that are about to end are not free."""
        names = {node.name for node in nodes}
        return tuple(node for node in self.workers.free_nodes() if node.name in names)

    def can_use(self, allocation: Allocation) -> bool:
        """Return true if no rank holds any of these GPUs."""
        return self.workers.can_hold(allocation)

    def used_up(self) -> str | None:
        """Return the limit of the run's budget that is reached; None if none is."""
        return exceeded(self.budget, self.members.used(time.time()))
