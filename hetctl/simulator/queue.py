"""Members that wait for GPUs, in their planner's order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from hetctl.core.profile import Candidate
from hetctl.planners.base import Options, Planner


class WaitingQueue:
    """Candidates sorted by the planner's key, equal ones by when they first came."""

    def __init__(self, planner: Planner, options: Options) -> None:
        self._planner, self._options = planner, options
        self._numbers: dict[str, int] = {}
        self._keys: list[tuple[Any, int]] = []
        self.candidates: list[Candidate] = []

    def add(self, candidate: Candidate) -> None:
        """Put a candidate in its place."""
        key = self._key(candidate)
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self.candidates.insert(at, candidate)

    def remove(self, candidate: Candidate) -> None:
        """Take out the candidate of that name; it must be as it was added."""
        at = bisect_left(self._keys, self._key(candidate))
        del self._keys[at], self.candidates[at]

    def without(self, names: set[str]) -> Sequence[Candidate]:
        """Return the candidates but for those of `names`."""
        if not names:
            return self.candidates
        return [candidate for candidate in self.candidates if candidate.name not in names]

    def _key(self, candidate: Candidate) -> tuple[Any, int]:
        number = self._numbers.setdefault(candidate.name, len(self._numbers))
        return self._planner.order(candidate, self._options), number
