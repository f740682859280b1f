"""From groups of GPUs to virtual workers; the number of minibatches in flight; the best grouping."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hetctl.core.errors import InfeasibleError
from hetctl.planners.pipeline.bound import lower_bound_s
from hetctl.planners.pipeline.cluster import PipelineCluster
from hetctl.planners.pipeline.coarse import coarse
from hetctl.planners.pipeline.costs import StageCosts
from hetctl.planners.pipeline.grouping import MOST_SETS, all_cells, exact_groupings
from hetctl.planners.pipeline.improvement import improved
from hetctl.planners.pipeline.in_flight import SAME, enough
from hetctl.planners.pipeline.layers import LayerProfile
from hetctl.planners.pipeline.partition import Cut, Partitioner
from hetctl.planners.pipeline.stages import VirtualWorker, virtual_worker
from hetctl.planners.pipeline.virtual_workers import GROUPINGS, Grouping

SET_S, ELEMENT_S = 5e-4, 1.5e-8
"""About the time that the bottleneck of a set of GPUs takes, and each pair of layers in it."""
MOST_LAYERS = 100
"""Groupings of deeper networks are found on a coarse one; their partitions are exact."""


@dataclass(frozen=True)
class PipelineOptions:
    """What a person may set.

    Parameters
    ----------
    in_flight : int or None
        Minibatches in flight in each virtual worker; None: as many as give the highest throughput.
    seconds : float
        About how long `best` may search for groupings of its own.
    """

    in_flight: int | None = None
    seconds: float = 2.0
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Found:
    """A grouping of GPUs, and the virtual workers that they make."""

    grouping: Grouping
    virtual_workers: tuple[VirtualWorker, ...]

    @property
    def bottleneck_s(self) -> float:
        """Seconds of the slowest stage of all."""
        return max(worker.bottleneck_s for worker in self.virtual_workers)

    @property
    def period_s(self) -> float:
        """Seconds between the minibatches of the slowest virtual worker."""
        return max(worker.period_s for worker in self.virtual_workers)

    @property
    def throughput(self) -> float:
        """Minibatches/s of all, each as fast as the slowest one."""
        return len(self.virtual_workers) / self.period_s


class Search:
    """One question, with what was found on the way to its answer."""

    def __init__(self, layers: LayerProfile, cluster: PipelineCluster, options: PipelineOptions) -> None:
        self._layers, self._cluster, self._options = layers, cluster, options
        self._costs = StageCosts(layers, cluster)
        self._exact = self._rough = _Partitioners(self._costs, cluster)
        if len(layers.layers) > MOST_LAYERS:
            self._rough = _Partitioners(StageCosts(coarse(layers, MOST_LAYERS), cluster), cluster)
        self._stop_s = 0.0

    def lower_bound_s(self, grouping: Grouping) -> float:
        """Return the limit of the virtual worker whose limit is the highest."""
        kinds = {tuple(sorted(map(self._cluster.type_of, group))) for group in grouping}
        return max(lower_bound_s(self._layers, kind, self._cluster.memory_bytes) for kind in kinds)

    def policy(self, name: str) -> Found:
        """Return the virtual workers of one of the paper's policies.

        Raises
        ------
        InfeasibleError
            If one of them has no room.
        """
        return self._of_grouping(GROUPINGS[name](self._layers, self._cluster))

    def best(self) -> Found:
        """Return the fastest of the paper's policies and our groupings.

        Raises
        ------
        InfeasibleError
            If none of them has room.
        """
        found, reasons = [], []
        for name in GROUPINGS:
            try:
                found.append(self.policy(name))
            except InfeasibleError as error:
                reasons.append(error)
        self._stop_s = self._options.clock() + self._options.seconds
        found += self._ours(found)
        if not found:
            raise reasons[0]
        fastest = _fastest(found)
        return _fastest([fastest, self._improved(fastest)])

    def _of_grouping(self, grouping: Grouping) -> Found:
        """Return the fastest for all numbers of minibatches in flight, with the fewest that it takes.

        More of them leave less memory to partition in: where all is as fast with the most as with one,
        they are enough, and no more are tried than keep the slowest stage busy.
        """
        if self._options.in_flight is not None:
            return self._with(grouping, self._options.in_flight)
        found = [self._with(grouping, 1)]
        most = _most_in_flight(max(map(len, grouping)))
        for number in (most, *range(2, most)):
            with suppress(InfeasibleError):
                found.append(self._with(grouping, number))
            fastest = _fastest(found)
            least_s = found[0].bottleneck_s if number == most else found[-1].bottleneck_s
            if fastest.period_s <= least_s * (1 + SAME):
                break
        return self._leaner(fastest) if most > 1 else found[0]

    def _with(self, grouping: Grouping, in_flight: int) -> Found:
        partitioner = self._exact[in_flight]
        return self._found(grouping, [partitioner.partition(group) for group in grouping], in_flight)

    def _found(self, grouping: Grouping, cuts: Sequence[Sequence[Cut]], in_flight: int) -> Found:
        layers, cluster, costs = self._layers, self._cluster, self._costs
        workers = (virtual_worker(layers, cluster, costs, of_one, in_flight) for of_one in cuts)
        return Found(grouping, tuple(workers))

    def _leaner(self, found: Found) -> Found:
        """Return the same with the fewest minibatches in flight that make it as fast."""
        workers = found.virtual_workers
        needed = max(enough(worker.passes, found.period_s) for worker in workers)
        if needed >= workers[0].in_flight:
            return found
        cuts = [[Cut(s.first, s.last, (s.node, s.gpu)) for s in worker.stages] for worker in workers]
        leaner = self._found(found.grouping, cuts, needed)
        return leaner if leaner.throughput >= found.throughput * (1 - SAME) else found

    def _ours(self, known: Sequence[Found]) -> Iterator[Found]:
        """Yield our groupings, those of small cells of the cluster first, as long as there is time."""
        effort_s = SET_S + ELEMENT_S * self._rough[1].layers ** 2
        most_sets = min(MOST_SETS, int(self._options.seconds / effort_s))
        found = list(known)
        for cells in all_cells(self._cluster, most_sets):
            first = _fastest(found).virtual_workers[0].in_flight if found else _most_in_flight(len(cells[0]))
            for grouping in self._in_cells(cells, first):
                found.append(grouping)
                yield grouping
            if self._is_late():
                return

    def _in_cells(self, cells: Grouping, first: int) -> Iterator[Found]:
        """Yield groupings for so many minibatches in flight, then for all other numbers that may do.

        With more of them memory leaves fewer partitions: they are not tried if they would not be faster
        even with the bottlenecks that fewer of them have.
        """
        numbers: Sequence[int] = (first, *range(1, _most_in_flight(len(cells[0])) + 1))
        if self._options.in_flight is not None:
            numbers = (self._options.in_flight,)
        fastest = 0.0
        for at, number in enumerate(numbers):
            ceiling = 0.0
            for grouping in exact_groupings(self._cluster, cells, self._rough[number].bottleneck_s):
                with suppress(InfeasibleError):
                    found = self._with(grouping, number)
                    fastest = max(fastest, found.throughput)
                    ceiling = max(ceiling, len(grouping) / found.bottleneck_s)
                    yield found if self._options.in_flight is not None else self._leaner(found)
            if (at and ceiling <= fastest * (1 + SAME)) or self._is_late():
                return

    def _improved(self, found: Found) -> Found:
        """Return a grouping that is no slower with as many minibatches in flight."""
        rough = self._rough[found.virtual_workers[0].in_flight]
        grouping = improved(self._cluster, found.grouping, rough.bottleneck_s, self._is_late)
        with suppress(InfeasibleError):
            return self._of_grouping(grouping) if grouping != found.grouping else found
        return found

    def _is_late(self) -> bool:
        return self._options.clock() >= self._stop_s


class _Partitioners(dict[int, Partitioner]):
    """A partitioner for each number of minibatches in flight, made when it is asked for."""

    def __init__(self, costs: StageCosts, cluster: PipelineCluster) -> None:
        super().__init__()
        self._costs, self._cluster = costs, cluster

    def __missing__(self, in_flight: int) -> Partitioner:
        self[in_flight] = Partitioner(self._costs, self._cluster, in_flight)
        return self[in_flight]


def _fastest(found: Sequence[Found]) -> Found:
    return max(found, key=lambda one: one.throughput)


def _most_in_flight(gpus: int) -> int:
    """Return what keeps a pipeline of so many GPUs busy, whatever its stages."""
    return 2 * gpus - 1
