"""Evaluation of groups of GPUs: their virtual workers and minibatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from hetctl.methods.pipeline.grouping import Grouping
from hetctl.methods.pipeline.partition import Cut, Partitioner
from hetctl.methods.pipeline.stage_costs import Group, LayerProfile, PipelineCluster, StageCosts
from hetctl.methods.pipeline.stages import VirtualWorker, virtual_worker
from hetctl.methods.pipeline.sync_cost import Waves, traffic_of
from hetctl.methods.pipeline.throughput import (
    Pipeline,
    common_period_s,
    least_period_s,
    sufficient_depth,
)
from hetctl.methods.pipeline.transfers import Traffic, at_once_s
from hetctl.model.pipelines import Stage

DEPTHS = 4
"""Most minibatches in flight per stage of a virtual worker; more than necessary, for longer waves."""
NEAR = 0.99
"""Share of the highest throughput that has to be reached with the fewest minibatches in flight."""
DEPTH_PRECISION = 8
"""Precision of that number: up to an eighth more than the fewest minibatches may be taken."""


@dataclass(frozen=True)
class PipelinePlan:
    """Virtual workers that train one network together.

    Parameters
    ----------
    traffic : tuple of Traffic
        Transfers of each virtual worker.
    distance : int
        Clock distance D.
    policy : str
        Policy that chose the grouping, one of `pipeline_plan.POLICIES`.
    lower_bound_s : float
        Lower bound of the slowest stage's time, over all partitions over the GPUs of these virtual workers.
    """

    grouping: Grouping
    virtual_workers: tuple[VirtualWorker, ...]
    traffic: tuple[Traffic, ...]
    distance: int
    policy: str = ""
    lower_bound_s: float = 0.0

    @property
    def in_flight(self) -> int:
        """Number of minibatches in flight in each virtual worker."""
        return self.virtual_workers[0].in_flight

    @property
    def bottleneck_s(self) -> float:
        """Seconds of the slowest stage of all virtual workers."""
        return max(worker.bottleneck_s for worker in self.virtual_workers)

    @cached_property
    def synchronisation_s(self) -> float:
        """Time to send a wave to the parameter servers and add it, if all virtual workers send at once."""
        return at_once_s([one.push for one in self.traffic])

    @cached_property
    def period_s(self) -> float:
        """Seconds between the minibatches of the slowest virtual worker."""
        return common_period_s(self.pipelines, self.in_flight, self.distance)

    @property
    def throughput(self) -> float:
        """Minibatches/s of all virtual workers, each as fast as the slowest one."""
        return len(self.virtual_workers) / self.period_s

    @cached_property
    def ceiling(self) -> float:
        """Upper bound of the throughput, faster to compute than the throughput itself."""
        least_s = least_period_s(self.pipelines, self.in_flight, self.distance)
        return len(self.virtual_workers) / least_s

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Passes and transfers of each virtual worker."""
        passes = (worker.passes for worker in self.virtual_workers)
        return tuple(map(Pipeline, passes, self.traffic))

    @property
    def stages(self) -> list[Stage]:
        """Stages of all virtual workers."""
        return [stage for worker in self.virtual_workers for stage in worker.stages]


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
        self._partitioner = cache(lambda in_flight: Partitioner(self._costs, cluster, in_flight))
        self._partition = cache(lambda group, in_flight: self._partitioner(in_flight).partition(group))

    def bottleneck_s(self, in_flight: int) -> Callable[[Group], float]:
        """Return a function from a group to the seconds of the slowest stage of its best partition."""
        return self._partitioner(in_flight).bottleneck_s

    def evaluate(self, grouping: Grouping, in_flight: int) -> PipelinePlan:
        """Return the best partitions for a number of minibatches in flight.

        Raises
        ------
        InfeasibleError
            If the layers do not fit into the memory of one of the groups.
        """
        return self._of_cuts(grouping, [self._partition(group, in_flight) for group in grouping], in_flight)

    def with_best_depth(self, evaluated: PipelinePlan) -> PipelinePlan:
        """Return the same partitions with the fewest minibatches in flight that keep the throughput.

        They may be more, within memory: then waves are longer, and fewer of them are sent. The number is
        bisected, although with first come, first served, fewer may be faster than more.
        """
        deepest = self._deepest(evaluated)
        distinct = {worker.passes for worker in evaluated.virtual_workers}
        sync_s, distance = evaluated.synchronisation_s, evaluated.distance
        needed = max(sufficient_depth(passes, sync_s, distance) for passes in distinct)
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

    def _with(self, evaluated: PipelinePlan, in_flight: int) -> PipelinePlan:
        """Return the same partitions with another number of minibatches in flight."""
        if in_flight == evaluated.in_flight:
            return evaluated
        return self._of_cuts(evaluated.grouping, _cuts_of(evaluated), in_flight)

    def _deepest(self, evaluated: PipelinePlan) -> int:
        """Return the most minibatches in flight that fit into memory, Max_m in section 4.

        No stage begins to recompute for them.
        """
        cuts = _cuts_of(evaluated)
        most = max(evaluated.in_flight, DEPTHS * max(map(len, cuts)))
        free = self._cluster.free_bytes

        def fits(in_flight: int) -> bool:
            stages = (stage for worker in self._workers(cuts, in_flight) for stage in worker.stages)
            return all(
                stage.bytes <= free[stage.gpu_type] and stage.recomputes <= before.recomputes
                for stage, before in zip(stages, evaluated.stages, strict=True)
            )

        numbers = range(evaluated.in_flight + 1, most + 1)
        return next((number - 1 for number in numbers if not fits(number)), most)

    def _of_cuts(self, grouping: Grouping, cuts: Sequence[Sequence[Cut]], in_flight: int) -> PipelinePlan:
        workers = self._workers(cuts, in_flight)
        traffic = traffic_of(workers, self._layers, self._cluster, self._waves.ps_placement)
        return PipelinePlan(grouping, workers, traffic, self._waves.distance)

    def _workers(self, cuts: Sequence[Sequence[Cut]], in_flight: int) -> tuple[VirtualWorker, ...]:
        layers, cluster, costs = self._layers, self._cluster, self._costs
        return tuple(virtual_worker(layers, cluster, costs, of_one, in_flight) for of_one in cuts)


def _cuts_of(evaluated: PipelinePlan) -> list[list[Cut]]:
    return [[Cut(s.first, s.last, (s.node, s.gpu)) for s in w.stages] for w in evaluated.virtual_workers]
