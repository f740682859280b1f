"""Evaluation of groups of GPUs: their virtual workers and minibatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hetctl.methods.pipeline.grouping import Grouping
from hetctl.methods.pipeline.partition import Cut, Partitioner
from hetctl.methods.pipeline.stage_costs import Group, LayerProfile, PipelineCluster, StageCosts
from hetctl.methods.pipeline.stages import VirtualWorker, virtual_worker
from hetctl.methods.pipeline.sync_cost import Waves, traffic_of
from hetctl.methods.pipeline.throughput import (
    Synced,
    WaveSync,
    common_period_s,
    least_period_s,
    sufficient_depth,
)
from hetctl.model.pipelines import Stage

DEPTHS = 4
"""Most minibatches in flight per stage of a virtual worker; more than necessary, for longer waves."""
NEAR = 0.99
"""Share of the highest throughput that has to be reached with the fewest minibatches in flight."""
DEPTH_PRECISION = 8
"""Precision of that number: up to an eighth more than the fewest minibatches may be taken."""


@dataclass(frozen=True)
class Evaluated:
    """A grouping of GPUs with its virtual workers."""

    grouping: Grouping
    virtual_workers: tuple[VirtualWorker, ...]
    wave_sync: WaveSync

    @property
    def in_flight(self) -> int:
        """Number of minibatches in flight in each virtual worker."""
        return self.virtual_workers[0].in_flight

    @property
    def bottleneck_s(self) -> float:
        """Time of the slowest stage of all virtual workers in seconds."""
        return max(worker.bottleneck_s for worker in self.virtual_workers)

    @cached_property
    def period_s(self) -> float:
        """Seconds between the minibatches of the slowest virtual worker."""
        return common_period_s(self._synced(), self.in_flight, self.wave_sync.distance)

    @property
    def throughput(self) -> float:
        """Minibatches/s of all virtual workers, each as fast as the slowest one."""
        return len(self.virtual_workers) / self.period_s

    @cached_property
    def ceiling(self) -> float:
        """Upper bound of the throughput, faster to compute than the throughput itself."""
        least_s = least_period_s(self._synced(), self.in_flight, self.wave_sync.distance)
        return len(self.virtual_workers) / least_s

    def _synced(self) -> tuple[Synced, ...]:
        passes = (worker.passes for worker in self.virtual_workers)
        return tuple(zip(passes, self.wave_sync.traffic, strict=True))


class GroupingEvaluator:
    """Builder of virtual workers from a network's layers; partitions are cached.

    Parameters
    ----------
    recompute : bool
        As in `StageCosts`.
    """

    def __init__(
        self, layers: LayerProfile, cluster: PipelineCluster, waves: Waves, *, recompute: bool = True
    ) -> None:
        self._layers, self._cluster, self._waves = layers, cluster, waves
        self._costs = StageCosts(layers, cluster, recompute=recompute)
        self._partitioners: dict[int, Partitioner] = {}
        self._cuts: dict[tuple[int, Group], tuple[Cut, ...]] = {}

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self._costs.layers

    def bottleneck_s(self, in_flight: int) -> Callable[[Group], float]:
        """Return a function from a group to the seconds of the slowest stage of its best partition."""
        return self._partitioner(in_flight).bottleneck_s

    def evaluate(self, grouping: Grouping, in_flight: int) -> Evaluated:
        """Return the best partitions for a number of minibatches in flight.

        Raises
        ------
        InfeasibleError
            If the layers do not fit into the memory of one of the groups.
        """
        return self._of_cuts(grouping, [self._partition(group, in_flight) for group in grouping], in_flight)

    def with_best_depth(self, evaluated: Evaluated) -> Evaluated:
        """Return the same partitions with the fewest minibatches in flight that keep the throughput.

        They may be more, within memory: then waves are longer, and fewer of them are sent. The number is
        bisected, although with first come, first served, fewer may be faster than more.
        """
        deepest = self._deepest(evaluated)
        distinct = {worker.passes for worker in evaluated.virtual_workers}
        needed = max(sufficient_depth(passes, evaluated.wave_sync) for passes in distinct)
        top = self._with(evaluated, min(deepest, max(evaluated.in_flight, needed)))
        if top.throughput < NEAR * len(top.grouping) / top.bottleneck_s:
            top = max(top, self._with(evaluated, deepest), key=lambda one: one.throughput)
        low, wanted = 1, NEAR * top.throughput
        while top.in_flight - low > top.in_flight // DEPTH_PRECISION:
            trial = self._with(evaluated, (low + top.in_flight) // 2)
            if trial.ceiling >= wanted and trial.throughput >= wanted:
                top = trial
            else:
                low = trial.in_flight + 1
        return top

    def _with(self, evaluated: Evaluated, in_flight: int) -> Evaluated:
        """Return the same partitions with another number of minibatches in flight."""
        if in_flight == evaluated.in_flight:
            return evaluated
        return self._of_cuts(evaluated.grouping, _cuts_of(evaluated), in_flight)

    def _deepest(self, evaluated: Evaluated) -> int:
        """Return the most minibatches in flight that fit into memory, Max_m in section 4.

        No stage begins to recompute for them.
        """
        cuts = _cuts_of(evaluated)
        again = [stage.recomputes for stage in _stages_of(evaluated.virtual_workers)]
        most = max(evaluated.in_flight, DEPTHS * max(map(len, cuts)))
        numbers = range(evaluated.in_flight + 1, most + 1)
        return next((number - 1 for number in numbers if not self._fits(cuts, number, again)), most)

    def _fits(self, cuts: Sequence[Sequence[Cut]], in_flight: int, again: Sequence[bool]) -> bool:
        free = self._cluster.free_bytes
        stages = _stages_of(self._workers(cuts, in_flight))
        return all(
            stage.bytes <= free[stage.gpu_type] and stage.recomputes <= before
            for stage, before in zip(stages, again, strict=True)
        )

    def _of_cuts(self, grouping: Grouping, cuts: Sequence[Sequence[Cut]], in_flight: int) -> Evaluated:
        workers = self._workers(cuts, in_flight)
        traffic = traffic_of(workers, self._layers, self._cluster, self._waves.ps_placement)
        return Evaluated(grouping, workers, WaveSync(traffic, self._waves.distance))

    def _workers(self, cuts: Sequence[Sequence[Cut]], in_flight: int) -> tuple[VirtualWorker, ...]:
        layers, cluster, costs = self._layers, self._cluster, self._costs
        return tuple(virtual_worker(layers, cluster, costs, of_one, in_flight) for of_one in cuts)

    def _partition(self, group: Group, in_flight: int) -> tuple[Cut, ...]:
        key = (in_flight, group)
        if key not in self._cuts:
            self._cuts[key] = self._partitioner(in_flight).partition(group)
        return self._cuts[key]

    def _partitioner(self, in_flight: int) -> Partitioner:
        if in_flight not in self._partitioners:
            self._partitioners[in_flight] = Partitioner(self._costs, self._cluster, in_flight)
        return self._partitioners[in_flight]


def _stages_of(workers: Sequence[VirtualWorker]) -> list[Stage]:
    return [stage for worker in workers for stage in worker.stages]


def _cuts_of(evaluated: Evaluated) -> list[list[Cut]]:
    return [[Cut(s.first, s.last, (s.node, s.gpu)) for s in w.stages] for w in evaluated.virtual_workers]
