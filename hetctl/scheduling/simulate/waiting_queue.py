"""Queue of members that wait for GPUs, in their planner's order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence, Set
from typing import Any

from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Options, Planner


class WaitingQueue:
    """Workloads sorted by the planner's key, equal ones by their first arrival."""

    def __init__(self, planner: Planner, options: Options) -> None:
        self._order, self._options = planner.order, options
        self._numbers: dict[str, int] = {}
        self._waiting: dict[str, tuple[Any, int]] = {}
        self._keys: list[tuple[Any, int]] = []
        self.workloads: list[Workload] = []

    def add(self, workload: Workload) -> None:
        """Insert a workload in order."""
        number = self._numbers.setdefault(workload.name, len(self._numbers))
        key = self._waiting[workload.name] = self._order(workload, self._options), number
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self.workloads.insert(at, workload)

    def remove(self, name: str) -> None:
        """Remove the workload of that name."""
        at = bisect_left(self._keys, self._waiting.pop(name))
        del self._keys[at], self.workloads[at]

    def without(self, names: Set[str]) -> Sequence[Workload]:
        """Return the workloads except those of `names`."""
        if not names:
            return self.workloads
        return [workload for workload in self.workloads if workload.name not in names]
