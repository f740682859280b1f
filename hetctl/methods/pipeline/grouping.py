"""Grouping of GPUs into virtual workers: the three policies of HetPipe (section 8.1), and a search.

The throughput of all virtual workers is their number divided by the period of the slowest one (with a
finite clock distance). For each number of virtual workers the slowest period is minimised: the bottleneck
of every set of GPUs is known exactly, so it remains to fill the cluster with disjoint sets whose bottlenecks
are within a limit (`exact_groupings`). For clusters that are too large for that, `improved` is a local
search.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.pipeline.stage_costs import Gpu, Group, LayerProfile, PipelineCluster

Grouping = tuple[Group, ...]

MOST_SETS = 10_000
"""Most sets of GPUs for an exact search."""
MOST_SUBSETS = 400
"""Most sets of GPUs within a virtual worker in a local search; larger virtual workers are not considered."""

Taken = tuple[int, ...]
"""Number of GPUs of each kind; a kind is a type on a node."""
Bottleneck = Callable[[Group], float]
"""Function from a group of GPUs to the seconds of the slowest stage of its best partition."""
Rate = Callable[[Grouping], float]
"""Function from a grouping to its rate, which compares only with rates of other groupings."""


def node_partition(_profile: LayerProfile, cluster: PipelineCluster) -> Grouping:
    """Return NP: each node is a virtual worker; least communication, but different virtual workers."""
    return tuple(cluster.on(node) for node in range(len(cluster.nodes)))


def equal_distribution(_profile: LayerProfile, cluster: PipelineCluster) -> Grouping:
    """Return ED: as many equal virtual workers as possible, each with GPUs of every node.

    Their number is the greatest common divisor of the GPUs of each type in each node.
    """
    kinds = cluster.kinds(cluster.gpus)
    return distribute(kinds, math.gcd(*map(len, kinds)))


def hybrid_distribution(profile: LayerProfile, cluster: PipelineCluster) -> Grouping:
    """Return HD: each virtual worker has GPUs of a pair of types, such that all pairs are similar.

    The type with the highest total computing capability is paired with the one with the lowest, in the paper
    V with Q and R with G; the middle one of an odd number stays alone. A pair forms as many virtual workers
    as its GPUs allow, each as large as an average node.
    """
    size = max(1, round(len(cluster.gpus) / len(cluster.nodes)))
    groups: list[Group] = []
    for pair in _pairs(profile, cluster):
        kinds = [[gpu for gpu in cluster.gpus if cluster.type_of(gpu) == name] for name in sorted(pair)]
        groups += distribute(kinds, max(1, sum(map(len, kinds)) // size))
    return tuple(groups)


def _pairs(profile: LayerProfile, cluster: PipelineCluster) -> list[set[str]]:
    """Return pairs of types, ordered by the computing capability of all GPUs of a type together."""
    count = Counter(map(cluster.type_of, cluster.gpus))

    def capability(gpu_type: str) -> float:
        passes = profile.forward_s(gpu_type) + profile.backward_s(gpu_type)
        return count[gpu_type] / float(passes.sum())

    types = sorted(count, key=lambda gpu_type: (capability(gpu_type), gpu_type))
    return [{types[i], types[-1 - i]} for i in range((len(types) + 1) // 2)]


def distribute(kinds: Iterable[Sequence[Gpu]], count: int) -> Grouping:
    """Distribute the GPUs of each kind evenly over `count` groups: consecutive GPUs go to the same group.

    The GPUs of a kind with fewer GPUs than there are groups go to the groups with the fewest GPUs.
    """
    found: list[list[Gpu]] = [[] for _ in range(count)]
    for kind in kinds:
        for number, gpu in enumerate(kind):
            smallest = min(found, key=len)
            group = found[number * count // len(kind)] if len(kind) >= count else smallest
            group.append(gpu)
    return tuple(tuple(sorted(group)) for group in found)


GROUPINGS: dict[str, Callable[[LayerProfile, PipelineCluster], Grouping]] = {
    "np": node_partition,
    "ed": equal_distribution,
    "hd": hybrid_distribution,
}


def exact_groupings(
    cluster: PipelineCluster,
    cells: Grouping,
    bottleneck_s: Bottleneck,
    is_late: Callable[[], bool] = lambda: False,
) -> Iterator[Grouping]:
    """Yield the grouping with the least bottleneck for each number of virtual workers.

    Parameters
    ----------
    cells : Grouping
        Equal parts of the cluster; all are grouped in the same way.
    is_late : callable
        Function that returns true when the time is over. Then only the sets of GPUs examined so far are
        used, small ones first.
    """
    kinds = [_aligned(cluster, cell) for cell in cells]
    for sets in _packings(kinds[0], bottleneck_s, is_late):
        yield tuple(group for of_cell in kinds for group in _handed_out(sets, of_cell))


def all_cells(cluster: PipelineCluster, most_sets: int) -> list[Grouping]:
    """Return the divisions of the cluster into equal cells, the smallest cells first.

    A cell has a share of the nodes of each make or, the smallest ones, of the GPUs of each of these nodes.
    Cells with more than `most_sets` sets of GPUs are left out; the largest cell may be the whole cluster.
    """
    alike: dict[tuple[str, ...], Group] = {}
    for node, types in enumerate(cluster.nodes):
        make = tuple(sorted(types))
        alike[make] = (*alike.get(make, ()), *cluster.on(node))
    copies = math.gcd(*(len(gpus) // len(make) for make, gpus in alike.items()))
    shares = [distribute(alike.values(), share) for share in _divisors(copies)]
    kinds = [cluster.kinds(cell) for cell in shares[0]]
    parts = [
        tuple(part for of_cell in kinds for part in distribute(of_cell, share))
        for share in _divisors(math.gcd(*map(len, kinds[0])))[:-1]
    ]
    return [cells for cells in (*parts, *shares) if _sets(cluster, cells[0]) <= most_sets]


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first."""
    return [divisor for divisor in range(number, 0, -1) if number % divisor == 0]


def _aligned(cluster: PipelineCluster, cell: Group) -> list[Group]:
    """Return the kinds of GPUs in the same order for cells of like nodes."""
    return sorted(
        cluster.kinds(cell),
        key=lambda kind: (sorted(cluster.nodes[kind[0][0]]), kind[0][0], cluster.type_of(kind[0])),
    )


def _sets(cluster: PipelineCluster, group: Group) -> int:
    """Return the number of different sets of GPUs within a group."""
    return math.prod(len(kind) + 1 for kind in cluster.kinds(group))


def _handed_out(sets: Sequence[Taken], kinds: Sequence[Sequence[Gpu]]) -> Iterator[Group]:
    left = [list(kind) for kind in kinds]
    for taken in sets:
        yield tuple(sorted(left[kind].pop(0) for kind, count in enumerate(taken) for _ in range(count)))


def _packings(
    kinds: Sequence[Sequence[Gpu]], bottleneck_s: Bottleneck, is_late: Callable[[], bool]
) -> Iterator[list[Taken]]:
    """Yield the groups with the least bottleneck for each number of groups."""
    seconds = np.full([len(kind) + 1 for kind in kinds], np.inf)
    for taken in sorted(product(*(range(len(kind) + 1) for kind in kinds)), key=sum):
        if is_late():
            break
        if any(taken):
            group = [gpu for kind, count in zip(kinds, taken, strict=True) for gpu in kind[:count]]
            seconds[taken] = bottleneck_s(tuple(group))
    limits = np.unique(seconds[np.isfinite(seconds)])
    packed: dict[int, list[Taken]] = {}

    def most(at: int) -> int:
        if at not in packed:
            packed[at] = _packed(seconds <= limits[at])
        return len(packed[at])

    at, number = 0, 1
    while len(limits) and number <= most(len(limits) - 1):
        at += bisect_left(range(at, len(limits) - 1), number, key=most)
        yield packed[at]
        number = most(at) + 1


def _packed(good: NDArray[np.bool_]) -> list[Taken]:
    """Return a largest number of disjoint good sets that fit into all GPUs.

    Parameters
    ----------
    good : ndarray
        True for good sets, indexed by the number of GPUs of each kind; supersets of good sets are good.
    """
    smallest = [tuple(map(int, taken)) for taken in np.argwhere(_minimal(good))]
    fits = [np.ones_like(good)]
    while fits[-1].flat[-1]:
        more = np.zeros_like(good)
        for taken in smallest:
            there = tuple(slice(count, None) for count in taken)
            room = tuple(slice(0, size - count) for size, count in zip(good.shape, taken, strict=True))
            more[there] |= fits[-1][room]
        fits.append(more)
    left = tuple(size - 1 for size in good.shape)
    found = []
    for enough in reversed(fits[:-2]):
        taken, left = next(
            (taken, rest)
            for taken in smallest
            if min(rest := tuple(a - b for a, b in zip(left, taken, strict=True))) >= 0 and enough[rest]
        )
        found.append(taken)
    return found


def _minimal(good: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the good sets that need each of their GPUs to be good."""
    smaller = np.zeros_like(good)
    for axis in range(good.ndim):
        with_one = [slice(None)] * good.ndim
        without = [slice(None)] * good.ndim
        with_one[axis], without[axis] = slice(1, None), slice(0, -1)
        smaller[tuple(with_one)] |= good[tuple(without)]
    return good & ~smaller


def improved(
    cluster: PipelineCluster,
    grouping: Grouping,
    bottleneck_s: Bottleneck,
    is_late: Callable[[], bool],
    rate: Rate,
) -> Grouping:
    """Return a grouping that is no slower: a local optimum, unless the time is over earlier.

    A step changes a virtual worker, the slowest one first: it swaps a GPU with another virtual worker, takes
    a GPU over, is split in two, merged or given up. Each step raises the rate.

    Parameters
    ----------
    rate : callable
        Rate of a grouping, which depends on more than the slowest virtual worker.
    """
    search = _LocalSearch(cluster, bottleneck_s, rate)
    best, best_rate = grouping, search.rate(grouping)
    while True:
        for trial in search.neighbours(best):
            if is_late():
                return best
            # Gains below the tolerance may be rounding errors, and each costs another pass over all changes.
            if (trial_rate := search.rate(trial)) > best_rate * (1 + 1e-9):
                best, best_rate = trial, trial_rate
                break
        else:
            return best


class _LocalSearch:
    def __init__(self, cluster: PipelineCluster, bottleneck_s: Bottleneck, rate: Rate) -> None:
        self._cluster, self._bottleneck_s, self._rate = cluster, bottleneck_s, rate

    def rate(self, grouping: Grouping) -> float:
        slowest_s = max(map(self._seconds, grouping), default=math.inf)
        return self._rate(grouping) if slowest_s < math.inf else 0.0

    def _seconds(self, group: Group) -> float:
        return self._bottleneck_s(group) if _sets(self._cluster, group) <= MOST_SUBSETS else math.inf

    def neighbours(self, grouping: Grouping) -> Iterator[Grouping]:
        """Yield groupings with a changed slowest virtual worker, then with changed others."""
        by_time = sorted(grouping, key=self._seconds, reverse=True)
        used = {gpu for group in grouping for gpu in group}
        idle = tuple(gpu for gpu in self._cluster.gpus if gpu not in used)
        for at, group in enumerate(by_time):
            yield from self._changes(group, (*by_time[:at], *by_time[at + 1 :]), idle)

    def _changes(self, group: Group, others: Grouping, idle: Group) -> Iterator[Grouping]:
        yield from ((*others, *halves) for halves in self._halves(group))
        if others:
            yield others
        for gpu in self._one_of_each_kind(idle):
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
        for given in self._one_of_each_kind(other):
            if len(other) > 1:
                yield _with(group, given), _without(other, given)
            for taken in self._one_of_each_kind(group):
                if self._kind(taken) != self._kind(given):
                    yield _with(_without(group, taken), given), _with(_without(other, given), taken)

    def _one_of_each_kind(self, group: Group) -> list[Gpu]:
        return [kind[0] for kind in self._cluster.kinds(group)]

    def _kind(self, gpu: Gpu) -> tuple[int, str]:
        return gpu[0], self._cluster.type_of(gpu)


def _with(group: Group, gpu: Gpu) -> Group:
    return tuple(sorted((*group, gpu)))


def _without(group: Group, gpu: Gpu) -> Group:
    return tuple(other for other in group if other != gpu)
