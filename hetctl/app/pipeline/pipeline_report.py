"""Reports of a pipeline plan and of its simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.pipeline_plan import PipelinePlan, Stage
from hetctl.methods.pipeline.simulate import PipelineRun


@dataclass(frozen=True)
class StageOutcome:
    """A stage and its use of a GPU; `busy_fraction` is None without simulation."""

    first: int
    last: int
    first_layer: str
    last_layer: str
    node: int
    gpu: int
    gpu_type: str
    forward_s: float
    backward_s: float
    receive_s: float
    seconds: float
    bytes: int
    memory_bytes: int
    busy_fraction: float | None = None


@dataclass(frozen=True)
class WorkerOutcome:
    """A virtual worker; `rate` in minibatches/s is None without simulation."""

    in_flight: int
    bottleneck_s: float
    stages: tuple[StageOutcome, ...]
    rate: float | None = None


@dataclass(frozen=True)
class PlanOutcome:
    """A pipeline plan and its predicted rate.

    Parameters
    ----------
    ratio : float
        Ratio of its slowest stage to the lower bound.
    throughput : float
        Rate of all virtual workers in minibatches/s.
    synchronisation_s : float
        Seconds to send a wave's updates and to fetch the weights.
    """

    policy: str
    placement: str
    in_flight: int
    clock_distance: int
    bottleneck_s: float
    lower_bound_s: float
    ratio: float
    throughput: float
    synchronisation_s: float
    virtual_workers: tuple[WorkerOutcome, ...]


@dataclass(frozen=True)
class SimulationOutcome:
    """Simulated run of a pipeline plan.

    Parameters
    ----------
    throughput, planned_throughput : float
        Rates of all virtual workers in minibatches/s.
    efficiency : float
        Ratio of `throughput` to the rate without idle time of the slowest stage.
    synchronisation_s : float
        Seconds to send a wave's updates and to fetch the weights.
    minibatches : int
        Minibatches completed by all virtual workers until `end_s`.
    """

    policy: str
    placement: str
    in_flight: int
    clock_distance: int
    local_staleness: int
    global_staleness: int
    bottleneck_s: float
    lower_bound_s: float
    ratio: float
    throughput: float
    planned_throughput: float
    efficiency: float
    synchronisation_s: float
    minibatches: int
    end_s: float
    virtual_workers: tuple[WorkerOutcome, ...]


def outcomes_of(
    planned: PipelinePlan, layers: LayerProfile, cluster: PipelineCluster, run: PipelineRun | None = None
) -> tuple[WorkerOutcome, ...]:
    """Return the virtual workers of a plan, with busy fractions if it was simulated."""
    outcomes = []
    for number, worker in enumerate(planned.virtual_workers):
        busy: Sequence[float | None] = run.busy_fractions(number) if run else [None] * len(worker.stages)
        outcomes.append(
            WorkerOutcome(
                in_flight=worker.in_flight,
                bottleneck_s=worker.bottleneck_s,
                stages=tuple(
                    _stage(stage, layers, cluster, share)
                    for stage, share in zip(worker.stages, busy, strict=True)
                ),
                rate=run.rates[number] if run else None,
            )
        )
    return tuple(outcomes)


def _stage(
    stage: Stage, layers: LayerProfile, cluster: PipelineCluster, busy_fraction: float | None
) -> StageOutcome:
    return StageOutcome(
        first=stage.first,
        last=stage.last,
        first_layer=layers.layers[stage.first].name,
        last_layer=layers.layers[stage.last].name,
        node=stage.node,
        gpu=stage.gpu,
        gpu_type=stage.gpu_type,
        forward_s=stage.forward_s,
        backward_s=stage.backward_s,
        receive_s=stage.receive_s,
        seconds=stage.seconds,
        bytes=stage.bytes,
        memory_bytes=cluster.memory_bytes[stage.gpu_type],
        busy_fraction=busy_fraction,
    )
