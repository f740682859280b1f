"""Simulation of virtual workers and of whole plans on a virtual clock, with the same flow as in planning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import NamedTuple

from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.pipeline_flow import Flow, run_waves
from hetctl.methods.pipeline.pipeline_plan import PipelinePlan, VirtualWorker
from hetctl.methods.pipeline.stage_costs import minibatches_held
from hetctl.methods.pipeline.sync_cost import Waves, synchronisation_s
from hetctl.methods.pipeline.wsp import Bounds

LEAST_WAVES, MINIBATCHES = 32, 4000
"""Waves of each virtual worker in the steady state, or fewer that contain this number of minibatches. The
waves until the clock distance is used up are added."""


@dataclass(frozen=True)
class StageTimes:
    """Times and memory of one stage for a minibatch.

    Parameters
    ----------
    forward_s, backward_s : float
        Seconds of each pass, including the transfer of its input from another GPU, for which the GPU waits.
    most_held : int
        Most minibatches whose activations fit into its memory, from forward to backward pass.
    """

    forward_s: float
    backward_s: float
    most_held: int


@dataclass(frozen=True)
class Pipeline:
    """A virtual worker.

    Parameters
    ----------
    push_s, pull_s : float
        Seconds to send the updates of a wave to the parameter servers, and to fetch their weights. Both
        overlap with the passes.
    """

    stages: tuple[StageTimes, ...]
    push_s: float = 0.0
    pull_s: float = 0.0

    @property
    def bottleneck_s(self) -> float:
        """Seconds of a minibatch in the slowest stage, the least time per minibatch."""
        return max(stage.forward_s + stage.backward_s for stage in self.stages)


class Pass(Enum):
    """Kind of a task."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"


class StagePass(NamedTuple):
    """A pass of a minibatch on a GPU; it was ready at `ready_s`."""

    worker: int
    stage: int
    minibatch: int
    what: Pass
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PipelineRun:
    """Result of a simulation.

    Parameters
    ----------
    tasks : tuple of StagePass
        Passes in order of their starts; the last ones may not have ended.
    completed_s : tuple of tuple of float
        Completion times of the minibatches, by virtual worker.
    """

    bounds: Bounds
    tasks: tuple[StagePass, ...]
    completed_s: tuple[tuple[float, ...], ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """Minibatches/s of each virtual worker, over the whole waves of the second half."""
        return tuple(_rate(times, self.bounds.in_flight) for times in self.completed_s)

    @property
    def throughput(self) -> float:
        """Minibatches/s of all virtual workers; in the long run none is faster than the slowest."""
        return len(self.rates) * min(self.rates)

    @property
    def end_s(self) -> float:
        """Completion time of the last minibatch in seconds."""
        return max(times[-1] for times in self.completed_s)

    def busy_fractions(self, worker: int) -> tuple[float, ...]:
        """Return the share of the run in which each GPU of a virtual worker was busy."""
        own = [task for task in self.tasks if task.worker == worker]
        busy_s = [0.0] * (1 + max(task.stage for task in own))
        for task in own:
            busy_s[task.stage] += max(0.0, min(task.end_s, self.end_s) - task.start_s)
        return tuple(seconds / self.end_s for seconds in busy_s)


def _rate(completed_s: Sequence[float], wave: int) -> float:
    last = len(completed_s) // wave * wave
    first = max(wave, last // wave // 2 * wave)
    return (last - first) / (completed_s[last - 1] - completed_s[first - 1])


def simulate_pipelines(pipelines: Sequence[Pipeline], bounds: Bounds, waves: int) -> PipelineRun:
    """Run until every virtual worker has completed `waves` waves, at least 2."""
    if waves < 2:
        raise ValueError(f"{waves} waves are too few for a rate")
    flows = [_flow(pipeline, bounds) for pipeline in pipelines]
    ends = run_waves(flows, bounds)
    end_s = max(next(islice(ends, waves - 1, None)))
    # The other virtual workers are ahead of the slowest: run until it, too, has reached `end_s`.
    next(True for ends_s in ends if min(ends_s) >= end_s)
    tasks = (task for number, flow in enumerate(flows) for task in _tasks(number, flow, end_s))
    completed_s = tuple(tuple(at_s for at_s in flow.completed_s if at_s <= end_s) for flow in flows)
    return PipelineRun(bounds, tuple(sorted(tasks, key=lambda task: task.start_s)), completed_s)


def _flow(pipeline: Pipeline, bounds: Bounds) -> Flow:
    passes = tuple((stage.forward_s, stage.backward_s) for stage in pipeline.stages)
    capacities = [stage.most_held for stage in pipeline.stages]
    return Flow(passes, capacities, bounds.in_flight, pipeline.push_s, pipeline.pull_s)


def _tasks(number: int, flow: Flow, end_s: float) -> Iterator[StagePass]:
    last = max(ran.stage for ran in flow.tasks)
    for ran in flow.tasks:
        if ran.start_s <= end_s:
            what = Pass.BOTH if ran.stage == last else Pass.BACKWARD if ran.backward else Pass.FORWARD
            yield StagePass(number, ran.stage, ran.minibatch, what, ran.ready_s, ran.start_s, ran.end_s)


def steady_waves(plan: PipelinePlan, waves: Waves) -> int:
    """Return the number of waves of each virtual worker that is enough to show a plan's throughput."""
    return max(2, min(LEAST_WAVES, MINIBATCHES // plan.in_flight)) + 4 * waves.distance


def simulate_plan(
    plan: PipelinePlan, layers: LayerProfile, cluster: PipelineCluster, waves: Waves, count: int
) -> PipelineRun:
    """Simulate a plan until each virtual worker has completed `count` waves, at least 2."""
    pipelines = pipelines_of(plan, layers, cluster, waves.placement)
    return simulate_pipelines(pipelines, Bounds(plan.in_flight, waves.distance), count)


def pipelines_of(
    plan: PipelinePlan, layers: LayerProfile, cluster: PipelineCluster, placement: str
) -> tuple[Pipeline, ...]:
    """Return the virtual workers of a plan; `placement` is one of `sync_cost.PLACEMENTS`."""
    sync_s = synchronisation_s(plan.virtual_workers, layers, cluster, placement)
    return tuple(Pipeline(_times(worker), sync_s, sync_s) for worker in plan.virtual_workers)


def _times(worker: VirtualWorker) -> tuple[StageTimes, ...]:
    passes = worker.passes
    return tuple(
        StageTimes(forward_s, backward_s, minibatches_held(len(passes) - number, worker.in_flight))
        for number, (forward_s, backward_s) in enumerate(passes, start=1)
    )
