"""Stages of virtual workers: computation, transfers and memory of each GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.partition import Cut
from hetctl.methods.pipeline.pipeline_flow import Passes
from hetctl.methods.pipeline.stage_costs import StageCosts
from hetctl.methods.pipeline.throughput import tasks
from hetctl.model.pipelines import Stage


@dataclass(frozen=True)
class VirtualWorker:
    """GPUs that train the whole network as a pipeline.

    Parameters
    ----------
    stages : tuple of Stage
        Stages in the order of the layers; a GPU that would slow down the pipeline has none.
    in_flight : int
        Minibatches in the pipeline at a time, N_m in the paper.
    """

    stages: tuple[Stage, ...]
    in_flight: int

    @property
    def bottleneck_s(self) -> float:
        """Time of the slowest stage in seconds."""
        return max(stage.seconds for stage in self.stages)

    @property
    def passes(self) -> Passes:
        """Seconds of the forward and the backward task of each stage."""
        return tasks([(stage.forward_s, stage.backward_s, stage.receive_s) for stage in self.stages])


def stages_of_layers(workers: Iterable[VirtualWorker]) -> Iterator[tuple[Stage, int]]:
    """Yield every layer of every virtual worker with its stage."""
    for worker in workers:
        for stage in worker.stages:
            for layer in range(stage.first, stage.last + 1):
                yield stage, layer


def virtual_worker(
    profile: LayerProfile, cluster: PipelineCluster, costs: StageCosts, cuts: Sequence[Cut], in_flight: int
) -> VirtualWorker:
    """Return a virtual worker with the times and bytes of the stages of a partition."""
    return VirtualWorker(tuple(_stages(profile, cluster, costs, cuts, in_flight)), in_flight)


def _stages(
    profile: LayerProfile, cluster: PipelineCluster, costs: StageCosts, cuts: Sequence[Cut], in_flight: int
) -> Iterator[Stage]:
    links = [int(before.gpu[0] == after.gpu[0]) for before, after in pairwise(cuts)]
    activations = [
        0.0,
        *(costs.receive_s[link, cut.first] for link, cut in zip(links, cuts[1:], strict=True)),
    ]
    for at, (first, last, gpu) in enumerate(cuts):
        gpu_type, layers, place = (
            cluster.type_of(gpu),
            slice(first, last + 1),
            (len(cuts) - 1 - at, in_flight),
        )
        again = bool(costs.recomputes(gpu_type, *place)[first, last])
        forward_s = float(profile.forward_s(gpu_type)[layers].sum())
        yield Stage(
            first=first,
            last=last,
            node=gpu[0],
            gpu=gpu[1],
            gpu_type=gpu_type,
            forward_s=forward_s,
            backward_s=float(profile.backward_s(gpu_type)[layers].sum()) + again * forward_s,
            receive_s=float(sum(activations[at : at + 2])),
            bytes=int(costs.bytes(*place, recomputes=again)[first, last]),
            recomputes=again,
        )
