"""Plan for pipelines: virtual workers, their stages, and their throughput."""

from __future__ import annotations

from dataclasses import dataclass

from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.grouping import GROUPINGS
from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.search import PipelineOptions, Search
from hetctl.methods.pipeline.stages import Stage, VirtualWorker
from hetctl.methods.pipeline.sync_cost import Waves
from hetctl.model.errors import BadInputError
from hetctl.scheduling.planners.base import nearest

__all__ = ["POLICIES", "PipelineOptions", "PipelinePlan", "Stage", "VirtualWorker", "Waves", "plan"]

BEST = "best"
POLICIES = (*GROUPINGS, BEST)


@dataclass(frozen=True)
class PipelinePlan:
    """Virtual workers that train one network together.

    Parameters
    ----------
    bottleneck_s : float
        Seconds of the slowest stage of all virtual workers.
    lower_bound_s : float
        Lower bound of the slowest stage's time, over all partitions over the GPUs of these virtual workers.
    throughput : float
        Minibatches/s of all virtual workers, each as fast as the slowest of them.
    synchronisation_s : float
        Time to send a wave to the parameter servers and add it, if all virtual workers send at once.
    """

    policy: str
    virtual_workers: tuple[VirtualWorker, ...]
    bottleneck_s: float
    lower_bound_s: float
    throughput: float
    synchronisation_s: float = 0.0

    @property
    def in_flight(self) -> int:
        """Number of minibatches in flight in each virtual worker."""
        return self.virtual_workers[0].in_flight


def plan(
    layers: LayerProfile,
    cluster: PipelineCluster,
    policy: str = BEST,
    options: PipelineOptions | None = None,
) -> PipelinePlan:
    """Group the GPUs by a policy and partition the layers over each virtual worker.

    Raises
    ------
    BadInputError
        If the policy is unknown, fewer than one minibatch is in flight, or the layers were not measured on a
        GPU type of the cluster.
    InfeasibleError
        If the network does not fit into the GPUs' memory.
    """
    options = options or PipelineOptions()
    if policy not in POLICIES:
        raise BadInputError(f"unknown policy {policy!r}", hint=nearest(policy, dict.fromkeys(POLICIES)))
    if options.in_flight is not None and options.in_flight < 1:
        raise BadInputError(f"{options.in_flight} minibatches in flight, but there must be at least 1")
    if lacking := set(cluster.gpu_types) - layers.gpu_types:
        raise BadInputError(f"the layers have no times on GPU type {', '.join(sorted(lacking))}")
    search = Search(layers, cluster, options)
    found = search.best() if policy == BEST else search.policy(policy)
    return PipelinePlan(
        policy=policy,
        virtual_workers=found.virtual_workers,
        bottleneck_s=found.bottleneck_s,
        lower_bound_s=search.lower_bound_s(found.grouping),
        throughput=found.throughput,
        synchronisation_s=found.sending.seconds if found.sending else 0.0,
    )
