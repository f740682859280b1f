"""Plans on trial: how many minibatches in flight they take, and which of several is the fastest.

A plan counts on a schedule of its own, and weights that are there when they are wanted. First come,
first served may need a few more minibatches in flight, and so may waves that take long to send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hetctl.control.wsp import Bounds
from hetctl.planners.pipeline.cluster import PipelineCluster
from hetctl.planners.pipeline.costs import StageCosts
from hetctl.planners.pipeline.layers import LayerProfile
from hetctl.planners.pipeline.partition import Cut
from hetctl.planners.pipeline.plan import PipelinePlan
from hetctl.planners.pipeline.stages import virtual_worker
from hetctl.simulator.pipelines import pipelines_of
from hetctl.simulator.pipelining import PipelineRun, simulate_pipelines

WAVES = 12
"""Of each trial."""
DEPTHS = 4
"""So many times its stages is the most that a pipeline is tried with."""
NEAR = 0.99
"""Of the highest throughput: the fewest minibatches that reach it are taken."""


@dataclass(frozen=True)
class Synchronised:
    """A network on a cluster, under WSP.

    Parameters
    ----------
    distance : int
        Clock distance D.
    placement : str
        Of layers on parameter servers, one of `hetctl.simulator.pipelines.PLACEMENTS`.
    """

    layers: LayerProfile
    cluster: PipelineCluster
    distance: int
    placement: str

    def run(self, plan: PipelinePlan, waves: int) -> PipelineRun:
        """Simulate a plan until each virtual worker has completed so many waves."""
        pipelines = pipelines_of(plan, self.layers, self.cluster, self.placement)
        return simulate_pipelines(pipelines, Bounds(plan.virtual_workers[0].in_flight, self.distance), waves)

    def fastest(self, plans: Iterable[PipelinePlan]) -> PipelinePlan:
        """Return the plan with the highest throughput, the first of equal ones."""
        return max(plans, key=self._throughput)

    def deepened(self, plan: PipelinePlan) -> PipelinePlan:
        """Return a plan with the minibatches in flight that its stages take, as far as they have memory."""
        plans = list(self._deeper(plan))
        wanted = NEAR * self._throughput(plans[-1])
        first, last = 0, len(plans) - 1
        while first < last:
            middle = (first + last) // 2
            if self._throughput(plans[middle]) >= wanted:
                last = middle
            else:
                first = middle + 1
        return plans[first]

    def _throughput(self, plan: PipelinePlan) -> float:
        return self.run(plan, WAVES).throughput

    def _deeper(self, plan: PipelinePlan) -> Iterator[PipelinePlan]:
        """Yield a plan with as many minibatches in flight as it has, one more, and so on."""
        yield plan
        layers, cluster = self.layers, self.cluster
        costs = StageCosts(layers, cluster)
        cuts = [[Cut(s.first, s.last, (s.node, s.gpu)) for s in w.stages] for w in plan.virtual_workers]
        for in_flight in range(plan.virtual_workers[0].in_flight + 1, 1 + DEPTHS * max(map(len, cuts))):
            workers = tuple(virtual_worker(layers, cluster, costs, of_one, in_flight) for of_one in cuts)
            stages = [stage for worker in workers for stage in worker.stages]
            if any(stage.bytes > cluster.memory_bytes[stage.gpu_type] for stage in stages):
                return
            period_s = max(worker.period_s for worker in workers)
            yield replace(plan, virtual_workers=workers, throughput=len(workers) / period_s)
