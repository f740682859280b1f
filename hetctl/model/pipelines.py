"""Pipelines: plans, simulations, and in training their layouts, times and versions of weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field

from hetctl.model.values import dataclass


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on one GPU; times are those of one minibatch.

    Parameters
    ----------
    first, last : int
        First and last layer, counted from 0, both included.
    node, gpu : int
        Numbers of the node, and of the GPU within it.
    backward_s : float
        Seconds of the backward pass, and of a second forward pass if the stage recomputes.
    receive_s : float
        Seconds to receive activations from the previous stage and gradients from the next one.
    bytes : int
        Memory for the minibatches that the stage holds, their weights, updates and a workspace.
    recomputes : bool
        True if it keeps the inputs of minibatches alone, and computes their forward passes again.
    first_layer, last_layer : str
        Names of these layers.
    total_s : float
        Time of a minibatch on the GPU in both directions, in seconds.
    memory_bytes : int
        Memory of the GPU without the framework's context.
    gpu_busy_fraction : float
        Share of a simulated run in which the GPU was busy.
    """

    first: int
    last: int
    node: int
    gpu: int
    gpu_type: str
    forward_s: float
    backward_s: float
    receive_s: float
    bytes: int
    recomputes: bool = False
    first_layer: str = ""
    last_layer: str = ""
    total_s: float = 0.0
    memory_bytes: int = 0
    gpu_busy_fraction: float = 0.0


@dataclass(frozen=True)
class SimulatedWorker:
    """A virtual worker; `rate` is in minibatches/s."""

    in_flight: int
    bottleneck_s: float
    stages: tuple[Stage, ...]
    rate: float


@dataclass(frozen=True)
class PipelineSimulation:
    """Plan of pipelines, and its simulated run.

    Parameters
    ----------
    ratio : float
        Ratio of the slowest stage to the lower bound.
    throughput, planned_throughput : float
        Rates of all virtual workers in minibatches/s.
    efficiency : float
        Ratio of `throughput` to the rate without idle time of the slowest stage.
    synchronisation_s : float
        Seconds to send a wave's updates and add them, if all virtual workers send at once.
    waiting_fraction, idle_fraction : float
        Mean shares of the run in which a virtual worker waits for global weights, and in which its GPUs are
        also idle.
    minibatches : int
        Minibatches completed by all virtual workers until `end_s`.
    node_bytes : tuple of int
        Most bytes that minibatches on their way, waves and parameter servers take of the memory of each node.
    """

    policy: str
    ps_placement: str
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
    waiting_fraction: float
    idle_fraction: float
    minibatches: int
    end_s: float
    node_bytes: tuple[int, ...]
    virtual_workers: tuple[SimulatedWorker, ...]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Consecutive layers of a network on one rank.

    Parameters
    ----------
    rank : int
        Rank in the member's group.
    first, last : int
        First and last layer, counted from 0, both included.
    held : int
        Most minibatches between their forward and backward passes for which its GPU has memory.
    recomputes : bool
        True if it keeps the inputs of minibatches alone, and computes their forward passes again before the
        backward passes.
    """

    rank: int
    first: int
    last: int
    held: int
    recomputes: bool = False


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """Virtual workers of a member, each with the whole network in stages.

    Parameters
    ----------
    workers : tuple of tuple of StagePlan
        Stages of each virtual worker in the order of the layers; the first stage of the first virtual worker
        is on rank 0.
    in_flight : int
        Concurrent minibatches of a virtual worker, which make a wave: N_m.
    distance : int
        Clock distance D between virtual workers.
    servers : tuple of int
        Rank with the parameter server of each layer; empty for a single virtual worker, which needs none.
    node_bytes : tuple of int
        Most bytes that minibatches on their way, waves and parameter servers take of the memory of each
        node, in the order of the allocation's placement.
    """

    workers: tuple[tuple[StagePlan, ...], ...]
    in_flight: int
    distance: int = 0
    servers: tuple[int, ...] = ()
    node_bytes: tuple[int, ...] = ()

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.workers[0][-1].last + 1

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the numbers of the virtual worker and of the stage of a rank, both counted from 0."""
        return next(
            (worker, stage)
            for worker, stages in enumerate(self.workers)
            for stage, plan in enumerate(stages)
            if plan.rank == rank
        )


PARAMETER_KINDS = frozenset({"init", "push", "weights"})
"""Kinds of messages with weights or their updates; all others have activations or gradients."""


@dataclass(frozen=True)
class StageReport:
    """A stage in one part of an epoch; times in seconds.

    Parameters
    ----------
    worker : str
        Node and number of its GPU or slot, as in ``node1:0``.
    virtual_worker, stage : int
        Number of its virtual worker, and of the stage in it.
    layers : tuple of int
        First and last layer, counted from 0.
    forward_s, backward_s : float
        Time of the passes, including the optimizer.
    wave_wait_s : float
        Time for which a first stage waited for waves of other virtual workers (the clock distance D).
    idle_s : float
        Other time without a pass: the pipeline fills or drains, or another stage is slower.
    within_node, between_nodes : mapping of str to int
        Bytes sent by kind of message: ``forward``, ``backward``, ``push``, ``weights``, ..
    """

    worker: str
    virtual_worker: int
    stage: int
    layers: tuple[int, int]
    forward_s: float
    backward_s: float
    wave_wait_s: float
    idle_s: float
    within_node: Mapping[str, int] = field(default_factory=dict)
    between_nodes: Mapping[str, int] = field(default_factory=dict)

    @property
    def busy_s(self) -> float:
        """Time of all passes."""
        return self.forward_s + self.backward_s

    @property
    def total_s(self) -> float:
        """Time of the part."""
        return self.busy_s + self.wave_wait_s + self.idle_s


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that all stages sent over one kind of link.

    Parameters
    ----------
    passes : int
        Activations and gradients.
    parameters : int
        Updates to the parameter servers, and weights from them.
    """

    passes: int
    parameters: int


@dataclass(frozen=True)
class PipelineUse:
    """Use of a pipeline's GPUs and links in one part of an epoch; shares are between 0 and 1.

    Parameters
    ----------
    slowest : str
        Node and GPU of the stage with the longest passes, which sets the pace.
    gpu_busy_fraction : float
        Share of its time in which that stage ran passes.
    wave_wait_fraction : float
        Share of the first stages' time in which they waited for waves of other virtual workers (the clock
        distance D).
    idle_fraction : float
        Share of all stages' time without a pass for other reasons: the bubble.
    within_node, between_nodes : LinkBytes
        Bytes sent to ranks of the same node, and of others.
    """

    slowest: str
    gpu_busy_fraction: float
    wave_wait_fraction: float
    idle_fraction: float
    within_node: LinkBytes
    between_nodes: LinkBytes


def pipeline_use(stages: Sequence[StageReport]) -> PipelineUse:
    """Return the use of a pipeline from the reports of all its stages."""
    slowest = max(stages, key=lambda stage: stage.busy_s)
    firsts = [stage for stage in stages if stage.stage == 0]
    return PipelineUse(
        slowest=slowest.worker,
        gpu_busy_fraction=_share([slowest.busy_s], [slowest.total_s]),
        wave_wait_fraction=_share([one.wave_wait_s for one in firsts], [one.total_s for one in firsts]),
        idle_fraction=_share([one.idle_s for one in stages], [one.total_s for one in stages]),
        within_node=_link_bytes(stage.within_node for stage in stages),
        between_nodes=_link_bytes(stage.between_nodes for stage in stages),
    )


def _share(parts_s: Sequence[float], totals_s: Sequence[float]) -> float:
    return sum(parts_s) / total_s if (total_s := sum(totals_s)) else 0.0


def _link_bytes(sent: Iterable[Mapping[str, int]]) -> LinkBytes:
    sizes = [(kind, size) for by_kind in sent for kind, size in by_kind.items()]
    parameters = sum(size for kind, size in sizes if kind in PARAMETER_KINDS)
    return LinkBytes(sum(size for _, size in sizes) - parameters, parameters)


@dataclass(frozen=True)
class PipelineEpoch:
    """Stages in an epoch, or in the last part of it that was trained without a pause.

    Parameters
    ----------
    epoch : int
        Number of the epoch, from 1.
    duration_s : float
        Time of the part.
    rate : float or None
        Rate of the epoch in samples/s; None if it has not ended, or was too short for a measurement.
    """

    epoch: int
    duration_s: float
    rate: float | None
    use: PipelineUse
    stages: tuple[StageReport, ...]


@dataclass(frozen=True)
class PipelineStatus:
    """Pipeline of a member in its newest task.

    Parameters
    ----------
    predicted_rate : float
        Simulated rate of the layout in samples/s.
    last : PipelineEpoch or None
        Its newest epoch; None if this layout has not trained one.
    """

    member: str
    layout: PipelineLayout
    predicted_rate: float
    last: PipelineEpoch | None = None


@dataclass(frozen=True)
class WaveRecord:
    """Weights that the minibatches of a wave used in one stage.

    Parameters
    ----------
    epoch : int
        Epoch, counted from 1.
    position : int
        Samples of the epoch that were trained before this part of it; minibatches count from there.
    worker, stage : int
        Numbers of the virtual worker and of the stage.
    first : int
        Number of the first minibatch of the record, counted from 1.
    completed : tuple of int
        Own minibatches whose updates the weights of each minibatch contained.
    pulled : tuple of int
        Waves of all virtual workers that these weights contained.
    round : int
        Round of the run.
    """

    epoch: int
    position: int
    worker: int
    stage: int
    first: int
    completed: tuple[int, ...]
    pulled: tuple[int, ...]
    round: int = 0

    @property
    def minibatches(self) -> Iterator[tuple[int, int, int]]:
        """Number, completed and pulled of each minibatch."""
        return zip(
            range(self.first, self.first + len(self.completed)), self.completed, self.pulled, strict=True
        )


@dataclass(frozen=True)
class WaveCheck:
    """Staleness of a member's weights against the bounds of its layouts with the same N_m and D.

    Parameters
    ----------
    in_flight, distance : int
        N_m and the clock distance D.
    minibatches : int
        Minibatches of all virtual workers and stages in the logs.
    local, local_bound : int
        Most updates of its own virtual worker that a minibatch missed, and that it may miss (s_local).
    overall : int or None
        Most updates of another virtual worker that a minibatch may have missed; None without another.
    overall_bound : int
        Most of these that it may miss (s_global).
    violations : tuple of str
        A line for each minibatch with older weights than the bounds allow.
    """

    member: str
    in_flight: int
    distance: int
    minibatches: int
    local: int
    local_bound: int
    overall: int | None
    overall_bound: int
    violations: tuple[str, ...] = ()
