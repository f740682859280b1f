"""Groupings of clusters that are too large to be searched exactly: changed step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from hetctl.planners.pipeline.cluster import Gpu, Group, PipelineCluster
from hetctl.planners.pipeline.virtual_workers import Grouping, dealt

MOST_SETS = 400
"""Sets of GPUs within a virtual worker that is tried."""

Bottleneck = Callable[[Group], float]


def improved(
    cluster: PipelineCluster, grouping: Grouping, bottleneck_s: Bottleneck, is_late: Callable[[], bool]
) -> Grouping:
    """Return a grouping that is no slower: a local optimum, unless time is out before.

    A step changes the slowest virtual worker: it swaps a GPU with another one or takes one over, is
    split in two or given up. Its number of virtual workers over the slowest bottleneck rises in
    each.
    """
    search = _Search(cluster, bottleneck_s)
    best, rate = grouping, search.rate(grouping)
    while True:
        for trial in search.neighbours(best):
            if is_late():
                return best
            if search.rate(trial) > rate * (1 + 1e-9):
                best, rate = trial, search.rate(trial)
                break
        else:
            return best


class _Search:
    def __init__(self, cluster: PipelineCluster, bottleneck_s: Bottleneck) -> None:
        self._cluster = cluster
        self._bottleneck_s = bottleneck_s

    def rate(self, grouping: Grouping) -> float:
        return len(grouping) / max(map(self._seconds, grouping), default=math.inf)

    def _seconds(self, group: Group) -> float:
        sets = math.prod(len(kind) + 1 for kind in self._cluster.kinds(group))
        return self._bottleneck_s(group) if sets <= MOST_SETS else math.inf

    def neighbours(self, grouping: Grouping) -> Iterator[Grouping]:
        """Yield groupings that differ in the slowest virtual worker."""
        slowest = max(grouping, key=self._seconds)
        others = list(grouping)
        others.remove(slowest)
        used = {gpu for group in grouping for gpu in group}
        idle = tuple(gpu for gpu in self._cluster.gpus if gpu not in used)
        yield from ((*others, *halves) for halves in self._halves(slowest))
        if others:
            yield tuple(others)
        for gpu in self._unlike(idle):
            yield (*others, _with(slowest, gpu))
        for at, other in enumerate(others):
            rest = (*others[:at], *others[at + 1 :])
            yield from ((*rest, *pair) for pair in self._exchanges(slowest, other))

    def _halves(self, group: Group) -> Iterator[Grouping]:
        if len(group) > 1:
            by_type: dict[str, list[Gpu]] = {}
            for gpu in group:
                by_type.setdefault(self._cluster.type_of(gpu), []).append(gpu)
            yield tuple(half for half in dealt(by_type.values(), 2) if half)

    def _exchanges(self, slowest: Group, other: Group) -> Iterator[Grouping]:
        for given in self._unlike(other):
            if len(other) > 1:
                yield _with(slowest, given), _without(other, given)
            for taken in self._unlike(slowest):
                if self._kind(taken) != self._kind(given):
                    yield _with(_without(slowest, taken), given), _with(_without(other, given), taken)

    def _unlike(self, group: Group) -> list[Gpu]:
        """Return one GPU of each type on each node."""
        return [kind[0] for kind in self._cluster.kinds(group)]

    def _kind(self, gpu: Gpu) -> tuple[int, str]:
        return gpu[0], self._cluster.type_of(gpu)


def _with(group: Group, gpu: Gpu) -> Group:
    return tuple(sorted((*group, gpu)))


def _without(group: Group, gpu: Gpu) -> Group:
    return tuple(other for other in group if other != gpu)
