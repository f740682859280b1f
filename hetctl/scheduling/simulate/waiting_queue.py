"""Members that wait for GPUs, in their planner's order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence, Set
from typing import Any

from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Options, Planner


class WaitingQueue:
    """Candidates sorted by the planner's key, equal ones by when they first came."""

    def __init__(self, planner: Planner, options: Options) -> None:
        self._order, self._options = planner.order, options
        self._numbers: dict[str, int] = {}
        self._waiting: dict[str, tuple[Any, int]] = {}
        self._keys: list[tuple[Any, int]] = []
        self.candidates: list[Workload] = []

    def add(self, candidate: Workload) -> None:
        """Put a candidate in its place."""
        number = self._numbers.setdefault(candidate.name, len(self._numbers))
        key = self._waiting[candidate.name] = self._order(candidate, self._options), number
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self.candidates.insert(at, candidate)

    def remove(self, name: str) -> None:
        """Take out the candidate of that name."""
        at = bisect_left(self._keys, self._waiting.pop(name))
        del self._keys[at], self.candidates[at]

    def without(self, names: Set[str]) -> Sequence[Workload]:
        """Return the candidates but for those of `names`."""
        if not names:
            return self.candidates
        return [candidate for candidate in self.candidates if candidate.name not in names]
