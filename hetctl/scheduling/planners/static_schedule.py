"""Schedules of members that run once, each on a constant number of GPUs of as few nodes as it needs."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from hetctl.model.values import dataclass
from hetctl.perf.epoch_timeline import Allotments
from hetctl.scheduling.planners.placement import most_on_one

NEAR = 1e-3
"""Relative distance from the bound at which a schedule is good enough."""

Heads = tuple[tuple[float, ...], ...]
"""Times in seconds from now when each GPU of a node becomes free, rising, by node."""


Parts = tuple[tuple[int, int], ...]
"""A share of the nodes, as (node, GPUs)."""


class Run(NamedTuple):
    """A member, by its number, on a number of GPUs for some seconds."""

    member: int
    gpus: int
    seconds: float


class Placed(NamedTuple):
    """A run with its start, in seconds from now, and its share of the nodes."""

    start_s: float
    run: Run
    parts: Parts

    @property
    def end_s(self) -> float:
        """Time when its GPUs are free again, in seconds from now."""
        return self.start_s + self.run.seconds


PlacedRuns = tuple[Placed, ...]
"""Runs in the order of starts, so that `follow` reproduces the schedule."""


@dataclass(frozen=True)
class Problem:
    """Members and nodes to be scheduled.

    Parameters
    ----------
    members : tuple of Allotments
        Numbers of GPUs that fit on the nodes, by member.
    heads : Heads
        Nodes with GPUs only.
    bound_s : float
        Lower bound of the makespan in seconds.
    mean : bool
        True if the mean completion time counts, not the last one.
    """

    members: tuple[Allotments, ...]
    heads: Heads
    bound_s: float
    mean: bool = False

    @cached_property
    def node_size(self) -> int:
        """GPUs of the largest node."""
        return max(len(head) for head in self.heads)

    def run(self, member: int, choice: int) -> Run:
        """Return a member's run on its `choice`-th number of GPUs."""
        allotments = self.members[member]
        return Run(member, allotments.gpus[choice], allotments.seconds[choice])

    def cost(self, schedule: Iterable[Placed]) -> float:
        """Return the cost to be minimised, in seconds: the last end, or the sum of all ends."""
        ends = [placed.end_s for placed in schedule]
        return math.fsum(ends) if self.mean else max(ends, default=0.0)

    @cached_property
    def least_cost(self) -> float:
        """Lower bound of the cost of any schedule, in seconds."""
        return math.fsum(member.seconds[-1] for member in self.members) if self.mean else self.bound_s

    def is_solved(self, cost: float) -> bool:
        """Return true if a cost is at its lower bound, or so near that a search is not worthwhile."""
        return cost <= self.least_cost * (1 + NEAR)


def placeable(node_sizes: Sequence[int]) -> frozenset[int]:
    """Return the numbers of GPUs that fit on full nodes of the largest size and a part of one more."""
    return frozenset(range(1, most_on_one(node_sizes) + 1))


def is_even(gpus: int, node_size: int) -> bool:
    """Return true if members with `gpus` GPUs fill nodes evenly: a divisor of a node, or whole nodes."""
    return (node_size % gpus if gpus <= node_size else gpus % node_size) == 0


def list_schedule(runs: Sequence[Run], heads: Heads) -> tuple[list[Placed], Heads]:
    """Place runs in the given order, each at its earliest start; return them and the heads after them.

    Among nodes with equal starts, a run gets the one with the fewest GPUs left over.
    """
    skyline = Skyline(heads, {run.gpus for run in runs})
    placed = [skyline.place(run) for run in runs]
    return placed, tuple(map(tuple, skyline.free))


def in_order(placed: Iterable[Placed], heads: Heads) -> PlacedRuns:
    """Return a schedule in the order of starts; no run starts later than before."""
    by_start = sorted(placed, key=lambda p: p.start_s)
    return follow([(p.run, p.parts) for p in by_start], heads)


def follow(assigned: Iterable[tuple[Run, Parts]], heads: Heads) -> PlacedRuns:
    """Start runs on their nodes in order, each as early as possible but not before the previous one."""
    free = [list(head) for head in heads]
    now_s, placed = 0.0, []
    for run, parts in assigned:
        now_s = max(now_s, *(free[node][gpus - 1] for node, gpus in parts))
        for node, gpus in parts:
            occupy(free[node], gpus, now_s, now_s + run.seconds)
        placed.append(Placed(now_s, run, parts))
    return tuple(placed)


class Skyline:
    """Times when each GPU becomes permanently free, and the best node for every number of GPUs."""

    def __init__(self, heads: Heads, wanted: Iterable[int]) -> None:
        self.free = [list(head) for head in heads]
        self._size = max(len(head) for head in heads)
        # A run takes full nodes, and a part of another.
        parts = {part for gpus in wanted for part in (self._size * (gpus >= self._size), gpus % self._size)}
        self._wanted = sorted(parts - {0})
        self._versions = [0] * len(heads)
        self._heaps: dict[int, list[tuple[float, int, int, int]]] = {part: [] for part in self._wanted}
        for node in range(len(heads)):
            for part, entry in self._entries(node):
                self._heaps[part].append(entry)
        for heap in self._heaps.values():
            heapq.heapify(heap)

    def place(self, run: Run) -> Placed:
        """Place a run on the GPUs that are free first, on as few nodes as it needs."""
        whole, part = divmod(run.gpus, self._size)
        found = [(*self._pop(self._size, set()), self._size) for _ in range(whole)]
        if part:
            found.append((*self._pop(part, {node for _, node, _ in found}), part))
        start_s = max(ready_s for ready_s, _, _ in found)
        for _, node, gpus in found:
            occupy(self.free[node], gpus, start_s, start_s + run.seconds)
            self._versions[node] += 1
            for part, entry in self._entries(node):
                heapq.heappush(self._heaps[part], entry)
        return Placed(start_s, run, tuple((node, gpus) for _, node, gpus in found))

    def _pop(self, gpus: int, taken: set[int]) -> tuple[float, int]:
        """Return when and where `gpus` GPUs of one node are free first, except on the nodes in `taken`."""
        heap, passed = self._heaps[gpus], []
        while True:
            ready_s, idle, node, version = heapq.heappop(heap)
            if node in taken:
                passed.append((ready_s, idle, node, version))
            # Entries of earlier states of a node stay in the heaps and are skipped here (lazy deletion).
            elif version == self._versions[node]:
                break
        for entry in passed:
            heapq.heappush(heap, entry)
        return ready_s, node

    def _entries(self, node: int) -> Iterable[tuple[int, tuple[float, int, int, int]]]:
        free, version = self.free[node], self._versions[node]
        for part in self._wanted:
            if part > len(free):
                return
            ready_s = free[part - 1]
            # At equal times the fewest idle GPUs come first (tightest fit), then the first node.
            yield part, (ready_s, bisect_right(free, ready_s), node, version)


def occupy(free: list[float], gpus: int, start_s: float, end_s: float) -> None:
    """Take GPUs of a node from `start_s` to `end_s`: of those free by then, the last to become free."""
    stop = bisect_right(free, start_s)
    del free[stop - gpus : stop]
    at = bisect_right(free, end_s)
    free[at:at] = [end_s] * gpus
