"""Members that wait for GPUs, with answers about all of them that are kept from one decision to the next."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from hetctl.model.workload import Workload
from hetctl.perf.bounds import Backlog


class WaitingQueue(list[Workload]):
    """Workloads sorted by a key, equal ones by their first arrival.

    A run of thousands of members has thousands of decisions: none may look at all that wait.

    Attributes
    ----------
    by_name : dict of str to Workload
        The workloads by name.
    widest : int
        Upper bound of the fewest GPUs of any of them.
    """

    def __init__(self, key: Callable[[Workload], Any], workloads: Iterable[Workload] = ()) -> None:
        super().__init__()
        self.by_name: dict[str, Workload] = {}
        self.widest = 0
        self._key = key
        self._numbers: dict[str, int] = {}
        self._keys: list[tuple[Any, int]] = []
        self._interruptions_s: list[float] = []
        self._backlog: Backlog | None = None
        for workload in workloads:
            self.add(workload)

    @property
    def interruption_s(self) -> float:
        """Largest time lost by an interruption of any of them, in seconds."""
        return self._interruptions_s[-1] if self._interruptions_s else 0.0

    def add(self, workload: Workload) -> None:
        """Insert a workload in order."""
        # A member that comes back keeps its first number, and so its place before later arrivals.
        number = self._numbers.setdefault(workload.name, len(self._numbers))
        key = self._key(workload), number
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self.insert(at, workload)
        self.by_name[workload.name] = workload
        insort(self._interruptions_s, workload.interruption_s)
        if workload.min_gpus > self.widest:
            # It may be too wide for the cluster, which only a new call of `backlog` tells.
            self.widest, self._backlog = workload.min_gpus, None
        if self._backlog:
            self._backlog.add(number, workload)

    def take(self, name: str) -> None:
        """Remove the workload of that name."""
        workload, number = self.by_name.pop(name), self._numbers[name]
        at = bisect_left(self._keys, (self._key(workload), number))
        del self._keys[at], self[at]
        del self._interruptions_s[bisect_left(self._interruptions_s, workload.interruption_s)]
        if self._backlog:
            self._backlog.take(number, workload)

    def without(self, names: Set[str]) -> Sequence[Workload]:
        """Return the workloads except those of `names`."""
        return [workload for workload in self if workload.name not in names] if names else self

    def backlog(self, gpus: int) -> Backlog:
        """Return the workloads by the time that each takes on up to `gpus` GPUs."""
        if self._backlog is None or self._backlog.gpus != gpus:
            self._backlog = Backlog(gpus)
            for workload in self:
                self._backlog.add(self._numbers[workload.name], workload)
        return self._backlog
