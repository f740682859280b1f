"""Layout of a member's pipeline on the nodes of a job, from its layers, and the planner of such members."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import Any

from hetctl.methods.pipeline.pipeline_plan import BEST, PipelineOptions, PipelinePlan, plan
from hetctl.methods.pipeline.stage_costs import (
    UNNAMED,
    Gpu,
    LayerProfile,
    Links,
    PipelineCluster,
    minibatches_held,
)
from hetctl.methods.pipeline.stages import node_bytes
from hetctl.methods.pipeline.transfers import Waves, server_gpus
from hetctl.model.errors import InfeasibleError
from hetctl.model.pipelines import PipelineLayout, StagePlan
from hetctl.model.plan import PIPELINE, Allocation, Placement
from hetctl.model.serialization import decode
from hetctl.model.site import Node
from hetctl.model.values import dataclass
from hetctl.scheduling.planners.base import Decision, Planner, Request

PLANNER = "pipelines"
SLACK = 2
"""Minibatches in flight beyond the fewest with which no stage waits if all passes take exactly their times.

Measured with 2 virtual workers x 4 stages of 60 ms: 4, the fewest, reach 0.83 of the bound, 6 0.96, 8 0.97.
"""


@dataclass(frozen=True)
class PipelineProblem:
    """A member's layers, and what limits its pipelines.

    Parameters
    ----------
    memory_bytes, context_bytes : mapping of str to int
        Memory of a GPU, and what the framework takes of it before it holds any layer, by type.
    batch_size : int
        Samples of a minibatch.
    gpu_type : str
        Type of the GPUs of nodes that name none.
    node_memory_bytes : int or None
        Memory of a node for minibatches on their way, waves and parameter servers; None: no limit.
    max_gpus : int or None
        Most GPUs that the member may have; None: no limit.
    policy : str
        Policy of grouping, one of `pipeline_plan.POLICIES`.
    in_flight : int or None
        Minibatches in flight, N_m; None: as many as are best.
    search_s : float
        Search time in seconds.
    """

    layers: LayerProfile
    memory_bytes: Mapping[str, int]
    links: Links
    batch_size: int
    context_bytes: Mapping[str, int] = field(default_factory=dict)
    gpu_type: str = UNNAMED
    node_memory_bytes: int | None = None
    max_gpus: int | None = None
    policy: str = BEST
    waves: Waves = field(default_factory=Waves)
    in_flight: int | None = None
    search_s: float = 2.0


@dataclass(frozen=True)
class PlacedPipeline:
    """A pipeline on GPUs of a job.

    Parameters
    ----------
    placement : tuple of Placement
        GPUs in the order of the layout's ranks.
    rate : float
        Simulated rate in samples/s.
    """

    layout: PipelineLayout
    placement: tuple[Placement, ...]
    rate: float


def lay_out(problem: PipelineProblem, nodes: Sequence[Node]) -> PlacedPipeline:
    """Plan the pipeline of a member on nodes.

    Raises
    ------
    InfeasibleError
        If its layers do not fit the GPUs, or the rest does not fit the memory of the nodes.
    """
    used = _first_gpus(nodes, problem.max_gpus)
    types = tuple((node.gpu_type or problem.gpu_type,) * len(node.gpus) for node in used)
    present = {name for of_node in types for name in of_node}
    memory = {name: problem.memory_bytes[name] for name in sorted(present)}
    cluster = PipelineCluster(types, memory, problem.links, problem.context_bytes)
    options = PipelineOptions(problem.in_flight, problem.search_s, problem.waves)
    fewest = plan(problem.layers, cluster, problem.policy, options)
    # More minibatches in flight are not worth recomputing.
    recomputes = any(stage.recomputes for stage in fewest.stages)
    for more in range(SLACK, 0, -1) if problem.in_flight is None else ():
        with suppress(InfeasibleError):
            options = replace(options, in_flight=fewest.in_flight + more, recompute=recomputes)
            return _laid_out(plan(problem.layers, cluster, problem.policy, options), problem, used)
    return _laid_out(fewest, problem, used)


def _laid_out(planned: PipelinePlan, problem: PipelineProblem, nodes: Sequence[Node]) -> PlacedPipeline:
    """Return a plan with ranks and rate; InfeasibleError if a node has too little memory beside its GPUs."""
    placement, ranks = _placed(planned, nodes)
    layout = layout_of(planned, problem, len(nodes), ranks)
    _refuse_without_memory(layout, placement, problem)
    run = planned.simulated(planned.steady_waves)
    return PlacedPipeline(layout, placement, run.throughput * problem.batch_size)


def _refuse_without_memory(
    layout: PipelineLayout, placement: Sequence[Placement], problem: PipelineProblem
) -> None:
    """Raise InfeasibleError if minibatches, waves and servers may take more than the memory of a node."""
    most = problem.node_memory_bytes
    for place, needed in zip(placement, layout.node_bytes, strict=True):
        if most is not None and needed > most:
            waves = ", waves and parameter servers" if len(layout.workers) > 1 else ""
            raise InfeasibleError(
                f"minibatches on their way{waves} take up to {needed:,} bytes of the memory of node"
                f" {place.node}, which has {most:,}",
                f"{_less_memory(layout)}, or form other virtual workers with --policy",
            )


def _less_memory(layout: PipelineLayout) -> str:
    """Return the changes that lower a pipeline's use of node memory, the most effective first."""
    if layout.distance and len(layout.workers) > 1:
        return f"lower --clock-distance, now {layout.distance}"
    if layout.in_flight > 1:
        return f"lower --in-flight, now {layout.in_flight}"
    return "use fewer GPUs"


def layout_of(
    planned: PipelinePlan, problem: PipelineProblem, nodes: int, ranks: Mapping[Gpu, int]
) -> PipelineLayout:
    """Return the layout of a plan.

    Parameters
    ----------
    ranks : mapping
        Rank by GPU.
    """
    workers = tuple(
        tuple(
            StagePlan(
                rank=ranks[stage.node, stage.gpu],
                first=stage.first,
                last=stage.last,
                held=minibatches_held(len(worker.stages) - 1 - at, worker.in_flight, is_first=at == 0),
                recomputes=stage.recomputes,
            )
            for at, stage in enumerate(worker.stages)
        )
        for worker in planned.virtual_workers
    )
    waves, sizes = problem.waves, problem.layers.parameter_bytes.tolist()
    servers = server_gpus(planned.virtual_workers, sizes, nodes, waves.ps_placement)
    of_nodes = node_bytes(problem.layers, planned.virtual_workers, servers, waves.distance)
    return PipelineLayout(
        workers,
        planned.in_flight,
        waves.distance,
        tuple(ranks[server] for server in servers) if len(workers) > 1 else (),
        tuple(of_nodes.get(node, 0) for node in dict.fromkeys(node for node, _ in ranks)),
    )


def _placed(planned: PipelinePlan, nodes: Sequence[Node]) -> tuple[tuple[Placement, ...], dict[Gpu, int]]:
    """Return the used GPUs by node, and the rank of each; rank 0 has the first stage of the first worker."""
    by_node: dict[int, list[int]] = {}
    for stage in planned.stages:
        by_node.setdefault(stage.node, []).append(stage.gpu)
    placement = tuple(
        Placement(nodes[node].name, tuple(nodes[node].gpus[gpu] for gpu in gpus))
        for node, gpus in by_node.items()
    )
    order = [(node, gpu) for node, gpus in by_node.items() for gpu in gpus]
    return placement, {gpu: rank for rank, gpu in enumerate(order)}


def _first_gpus(nodes: Sequence[Node], most: int | None) -> list[Node]:
    """Return the first nodes, with at most `most` GPUs in all."""
    found, left = [], most
    for node in nodes:
        gpus = node.gpus if left is None else node.gpus[:left]
        if gpus:
            found.append(Node(node.name, gpus, node.gpu_type))
        left = None if left is None else left - len(gpus)
    return found


class Layouts:
    """Pipelines of a run's members on the nodes of a job; equal ones are planned once for the same nodes.

    Parameters
    ----------
    problems : mapping of str to Any
        Encoded `PipelineProblem` by member.
    planned_like : callable
        Function from a member to the member whose problem it has. A trial may have another config than was
        planned: it has the problem of a member of its shape.
    """

    def __init__(
        self, problems: Mapping[str, Any], planned_like: Callable[[str], str] = lambda name: name
    ) -> None:
        self._problems, self._planned_like = problems, planned_like
        self._texts = {name: json.dumps(problem, sort_keys=True) for name, problem in problems.items()}
        self._found: dict[tuple[str, tuple[Node, ...]], PlacedPipeline] = {}

    def find(self, member: str, nodes: tuple[Node, ...]) -> PlacedPipeline:
        """Return the pipeline of a member; InfeasibleError if its layers do not fit the GPUs."""
        planned = self._planned_like(member)
        key = self._texts[planned], nodes
        if key not in self._found:
            self._found[key] = lay_out(decode(PipelineProblem, self._problems[planned]), nodes)
        return self._found[key]


def allocation_of(member: str, found: PlacedPipeline) -> Allocation:
    """Return the allocation of a member that trains as a pipeline."""
    gpus = sum(len(place.gpus) for place in found.placement)
    return Allocation(member, gpus, PIPELINE, found.rate, found.placement, pipeline=found.layout)


LayOut = Callable[[str, tuple[Node, ...]], PlacedPipeline]
"""Function that returns the pipeline of a member on nodes."""


def pipeline_planner(find: LayOut) -> Planner:
    """Return the planner of members that train as pipelines: one after another, each on all GPUs."""

    def decide(request: Request) -> Decision:
        if request.free_gpus < sum(len(node.gpus) for node in request.all_nodes):
            return Decision()
        for workload in request.workloads:
            try:
                found = find(workload.name, request.nodes)
            except InfeasibleError:
                continue
            return Decision((allocation_of(workload.name, found),))
        return Decision()

    def reasons(request: Request, decision: Decision) -> Mapping[str, str]:
        started = {allocation.member for allocation in decision.start}
        waits = "waits: members that are pipelines train one after another"
        return {workload.name: waits for workload in request.workloads if workload.name not in started}

    return Planner(PLANNER, "local", decide, reasons=reasons)
