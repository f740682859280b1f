"""Local search for groupings of clusters that are too large for an exact search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from hetctl.methods.pipeline.gpu_cluster import Gpu, Group, PipelineCluster
from hetctl.methods.pipeline.virtual_workers import Grouping, distribute

MOST_SETS = 400
"""Most sets of GPUs within a virtual worker; larger virtual workers are not considered."""

Bottleneck = Callable[[Group], float]


Rate = Callable[[Grouping], float]


def improved(
    cluster: PipelineCluster,
    grouping: Grouping,
    bottleneck_s: Bottleneck,
    is_late: Callable[[], bool],
    rate: Rate | None = None,
) -> Grouping:
    """Return a grouping that is no slower: a local optimum, unless the time is over earlier.

    A step changes the slowest virtual worker: it exchanges a GPU with another one or takes one over, is
    split in two, merged with another one or given up. Each step raises the rate.

    Parameters
    ----------
    rate : callable, optional
        Rate of a grouping, if it depends on more than the slowest virtual worker; steps then change the
        others, too. By default the number of virtual workers divided by the slowest bottleneck.
    """
    search = _LocalSearch(cluster, bottleneck_s, rate)
    best, best_rate = grouping, search.rate(grouping)
    while True:
        for trial in search.neighbours(best):
            if is_late():
                return best
            if (trial_rate := search.rate(trial)) > best_rate * (1 + 1e-9):
                best, best_rate = trial, trial_rate
                break
        else:
            return best


class _LocalSearch:
    def __init__(self, cluster: PipelineCluster, bottleneck_s: Bottleneck, rate: Rate | None) -> None:
        self._cluster, self._bottleneck_s, self._rate = cluster, bottleneck_s, rate

    def rate(self, grouping: Grouping) -> float:
        slowest_s = max(map(self._seconds, grouping), default=math.inf)
        if self._rate is None or slowest_s == math.inf:
            return len(grouping) / slowest_s
        return self._rate(grouping)

    def _seconds(self, group: Group) -> float:
        sets = math.prod(len(kind) + 1 for kind in self._cluster.kinds(group))
        return self._bottleneck_s(group) if sets <= MOST_SETS else math.inf

    def neighbours(self, grouping: Grouping) -> Iterator[Grouping]:
        """Yield groupings with a changed slowest virtual worker, then, with `rate`, with changed others."""
        by_time = sorted(grouping, key=self._seconds, reverse=True)
        used = {gpu for group in grouping for gpu in group}
        idle = tuple(gpu for gpu in self._cluster.gpus if gpu not in used)
        for at, group in enumerate(by_time if self._rate else by_time[:1]):
            yield from self._changes(group, (*by_time[:at], *by_time[at + 1 :]), idle)

    def _changes(self, group: Group, others: Grouping, idle: Group) -> Iterator[Grouping]:
        yield from ((*others, *halves) for halves in self._halves(group))
        if others:
            yield others
        for gpu in self._unlike(idle):
            yield (*others, _with(group, gpu))
        for at, other in enumerate(others):
            rest = (*others[:at], *others[at + 1 :])
            yield (*rest, tuple(sorted((*group, *other))))
            yield from ((*rest, *pair) for pair in self._exchanges(group, other))

    def _halves(self, group: Group) -> Iterator[Grouping]:
        if len(group) > 1:
            by_type: dict[str, list[Gpu]] = {}
            for gpu in group:
                by_type.setdefault(self._cluster.type_of(gpu), []).append(gpu)
            yield tuple(half for half in distribute(by_type.values(), 2) if half)

    def _exchanges(self, group: Group, other: Group) -> Iterator[Grouping]:
        for given in self._unlike(other):
            if len(other) > 1:
                yield _with(group, given), _without(other, given)
            for taken in self._unlike(group):
                if self._kind(taken) != self._kind(given):
                    yield _with(_without(group, taken), given), _with(_without(other, given), taken)

    def _unlike(self, group: Group) -> list[Gpu]:
        """Return one GPU of each type on each node."""
        return [kind[0] for kind in self._cluster.kinds(group)]

    def _kind(self, gpu: Gpu) -> tuple[int, str]:
        return gpu[0], self._cluster.type_of(gpu)


def _with(group: Group, gpu: Gpu) -> Group:
    return tuple(sorted((*group, gpu)))


def _without(group: Group, gpu: Gpu) -> Group:
    return tuple(other for other in group if other != gpu)
