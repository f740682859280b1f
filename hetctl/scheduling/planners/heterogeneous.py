"""Planners on nodes with several types of GPU: each type is a separate cluster, or all are one.

A planner supports one type only. Here each member gets a type, and the planner is called once for each
type. With the option ``mix_types`` it is called once for all types: each GPU counts as an average one or,
without balanced batches, as one of the slowest type.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from typing import Any

from hetctl.model.plan import Allocation
from hetctl.model.site import Node
from hetctl.model.training_settings import OFF
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload
from hetctl.perf.bounds import Identity, least_s
from hetctl.perf.rate_extrapolation import gpu_count
from hetctl.scheduling.planners.base import Decision, Planner, Request, WaitingQueue, single_s
from hetctl.scheduling.planners.placement import most_on_one


@lru_cache(maxsize=256)
def by_type(planner: Planner) -> Planner:
    """Return the planner for nodes that may be of several types.

    A member stays on its first type, unless GPUs of another type would be idle. The kept state holds
    the type of each waiting member, and the planner's state for each type.
    """

    def decide(request: Request) -> Decision:
        request = _startable(request)
        parts = _parts(request)
        decisions = {gpu_type: planner.decide(part) for gpu_type, part in parts.items()}
        if None not in parts:
            return _merged(request, parts, decisions)
        return decisions[None] if parts[None] is request else _at_real_rates(request, decisions[None])

    def reasons(request: Request, decision: Decision) -> Mapping[str, str]:
        startable = _startable(request)
        names = {workload.name for workload in startable.workloads}
        words = {
            name: reason if gpu_type is None else f"on {gpu_type or 'GPUs of no known type'}, {reason}"
            for gpu_type, part in _parts(startable).items()
            for name, reason in planner.reasons(part, _part_of(decision, gpu_type, part)).items()
        }
        return words | {c.name: _too_wide(c) for c in request.workloads if c.name not in names}

    return replace(planner, decide=decide, reasons=reasons)


def _parts(request: Request) -> Mapping[str | None, Request]:
    """Return a request for each type, or under None one for all GPUs."""
    types = _types_of(Identity(request.all_nodes))
    # Without any node left the types are unknown; a state by type is kept all the same.
    if types == ("",) and not _is_by_type(request.planner_state):
        return {None: request}
    return {None: _mixed(request)} if request.options.mix_types else _split(request, types)


def _startable(request: Request) -> Request:
    """Return the request without waiting members that need more GPUs than there are, free or not."""
    most = most_for_one(request.all_nodes, mix_types=request.options.mix_types)
    # The simulator's queue knows the answer without a look at each member.
    if isinstance(request.workloads, WaitingQueue) and request.workloads.largest_min_gpus <= most:
        return request
    fitting = [workload for workload in request.workloads if workload.min_gpus <= most]
    return request if len(fitting) == len(request.workloads) else replace(request, workloads=fitting)


def most_for_one(nodes: Sequence[Node], *, mix_types: bool) -> int:
    """Return the most GPUs that one member can have, of one type or, if types are mixed, of all."""
    if mix_types:
        return most_on_one([len(node.gpus) for node in nodes])
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for node in nodes:
        sizes[node.gpu_type or ""].append(len(node.gpus))
    return max(map(most_on_one, sizes.values()), default=0)


def _too_wide(workload: Workload) -> str:
    return (
        f"waits for {gpu_count(workload.min_gpus)}: it trains on no fewer, and the nodes of the job have less"
    )


@lru_cache(maxsize=16)
def _types_of(nodes: Identity[tuple[Node, ...]]) -> tuple[str, ...]:
    """Return the types of the nodes' GPUs, "" for unknown types; a large cluster is examined only once."""
    return tuple(sorted({node.gpu_type or "" for node in nodes.value if node.gpus})) or ("",)


def _mixed(request: Request) -> Request:
    gpus = Counter[str]()
    for node in request.all_nodes:
        gpus[node.gpu_type or ""] += len(node.gpus)

    def on_all(workload: Workload) -> Workload:
        # The unary plus drops types without GPUs, which would otherwise limit the rates.
        return _on_types(workload, +gpus, request)

    return replace(
        request,
        workloads=[on_all(workload) for workload in request.workloads],
        held=tuple(replace(h, workload=on_all(h.workload)) for h in request.held),
    )


def _at_real_rates(request: Request, decision: Decision) -> Decision:
    """Return the decision with the rates on the types that members really got."""
    members = {c.name: c for c in (*request.workloads, *(h.workload for h in request.held))}
    types = {node.name: node.gpu_type or "" for node in request.all_nodes}

    def at_real_rate(given: Allocation) -> Allocation:
        workload = _on_types(members[given.member], gpus_by_type(given, types), request)
        return replace(given, rate=workload.rates[given.gpus])

    return replace(decision, start=tuple(at_real_rate(given) for given in decision.start))


def gpus_by_type(given: Allocation, types: Mapping[str, str]) -> Counter[str]:
    """Return the GPUs of each type that a member has, from the types of the nodes."""
    gpus = Counter[str]()
    for part in given.placement:
        gpus[types[part.node]] += len(part.gpus)
    return gpus


def _on_types(workload: Workload, gpus: Mapping[str, int], request: Request) -> Workload:
    """Return the member with its rates on the given GPUs of each type at once."""
    return workload.on_slowest(gpus) if request.options.balance == OFF else workload.on_balanced(gpus)


@dataclass
class _TypeQueue:
    """Members assigned to one type of GPU.

    Parameters
    ----------
    work : float
        GPU-seconds of their work on their fewest GPUs.
    """

    gpu_type: str
    nodes: tuple[Node, ...]
    free: tuple[Node, ...]
    held: set[str] = field(default_factory=set)
    waiting: dict[str, Workload] = field(default_factory=dict)
    work: float = 0.0

    def __post_init__(self) -> None:
        """Count the GPUs of this type, free or not, and the most that one member can have."""
        sizes = [len(node.gpus) for node in self.nodes]
        self.gpus, self.most = sum(sizes), most_on_one(sizes)

    def seconds(self, workload: Workload) -> float:
        """Return the GPU-seconds of a member on its fewest GPUs."""
        return single_s(workload.on_type(self.gpu_type))

    def add(self, workload: Workload) -> None:
        """Let a member wait for GPUs of this type."""
        self.waiting[workload.name] = workload
        self.work += self.seconds(workload)

    @property
    def surplus(self) -> int:
        """Number of waiting members beyond the free GPUs."""
        return len(self.waiting) - sum(len(node.gpus) for node in self.free)


def _split(request: Request, types: Sequence[str]) -> dict[str | None, Request]:
    """Return a request for each type, with the rates on that type."""

    def of(gpu_type: str, nodes: Iterable[Node]) -> tuple[Node, ...]:
        return tuple(node for node in nodes if node.gpus and homes[node.name] == gpu_type)

    homes = {node.name: node.gpu_type or "" for node in request.all_nodes if node.gpus}
    queues = {t: _TypeQueue(t, of(t, request.all_nodes), of(t, request.nodes)) for t in types}
    for held in request.held:
        queue = queues[homes[held.allocation.placement[0].node]]
        queue.held.add(held.workload.name)
        queue.work += queue.seconds(held.workload)
    _assign(request.workloads, queues, _remembered(request.planner_state, "members"))
    _use_idle_types(queues)
    return {gpu_type: _part(request, queue) for gpu_type, queue in queues.items()}


def _assign(
    workloads: Iterable[Workload], queues: Mapping[str, _TypeQueue], before: Mapping[str, str]
) -> None:
    """Assign waiting members to their former type, and new ones, the longest first, to the earliest end."""
    new = []
    for workload in workloads:
        former = before.get(workload.name, "")
        if workload.name in before and former in queues and workload.min_gpus <= queues[former].most:
            queues[former].add(workload)
        else:
            new.append(workload)
    alone = {
        c.name: {t: queue.seconds(c) for t, queue in queues.items() if c.min_gpus <= queue.most} for c in new
    }

    def done_s(workload: Workload, gpu_type: str) -> float:
        queue = queues[gpu_type]
        on_all = (queue.work + alone[workload.name][gpu_type]) / max(queue.gpus, 1)
        return max(on_all, least_s(workload.on_type(gpu_type), max(queue.gpus, 1)))

    for workload in sorted(new, key=lambda c: -min(alone[c.name].values())):
        earliest = min(alone[workload.name], key=lambda gpu_type: done_s(workload, gpu_type))
        queues[earliest].add(workload)


def _use_idle_types(queues: Mapping[str, _TypeQueue]) -> None:
    """Move half of the members that cannot start elsewhere to free GPUs without members."""
    for queue in queues.values():
        if queue.free and not queue.held and not queue.waiting:
            longest = max(queues.values(), key=lambda other: other.surplus)
            for name in list(longest.waiting)[len(longest.waiting) - -(-longest.surplus // 2) :]:
                if longest.waiting[name].min_gpus <= queue.most:
                    queue.waiting[name] = longest.waiting.pop(name)


def _part(request: Request, queue: _TypeQueue) -> Request:
    return replace(
        request,
        workloads=[c.on_type(queue.gpu_type) for c in request.workloads if c.name in queue.waiting],
        nodes=queue.free,
        gpus=queue.gpus,
        held=tuple(
            replace(h, workload=h.workload.on_type(queue.gpu_type))
            for h in request.held
            if h.workload.name in queue.held
        ),
        cluster=queue.nodes,
        planner_state=_remembered(request.planner_state, "gpu_types").get(queue.gpu_type),
    )


def _merged(
    request: Request, parts: Mapping[str | None, Request], decisions: Mapping[str | None, Decision]
) -> Decision:
    """Return the decisions of all types as one; the state of types without nodes is kept."""
    again = [decision.replan_at_s for decision in decisions.values() if decision.replan_at_s is not None]
    started = {given.member for decision in decisions.values() for given in decision.start}
    members = {
        c.name: gpu_type for gpu_type, part in parts.items() for c in part.workloads if c.name not in started
    }
    memories = {gpu_type: decision.planner_state for gpu_type, decision in decisions.items()}
    return Decision(
        start=tuple(given for decision in decisions.values() for given in decision.start),
        stop=tuple(name for decision in decisions.values() for name in decision.stop),
        replan_at_s=min(again, default=None),
        planner_state={
            "members": members,
            "gpu_types": {**_remembered(request.planner_state, "gpu_types"), **memories},
        },
    )


def _part_of(decision: Decision, gpu_type: str | None, part: Request) -> Decision:
    """Return the part of a decision that concerns one type, or all of it."""
    if gpu_type is None:
        return decision
    names = {c.name for c in part.workloads} | {h.workload.name for h in part.held}
    return Decision(
        start=tuple(given for given in decision.start if given.member in names),
        stop=tuple(name for name in decision.stop if name in names),
        planner_state=_remembered(decision.planner_state, "gpu_types").get(gpu_type),
    )


def _is_by_type(state: Any) -> bool:
    return isinstance(state, Mapping) and "gpu_types" in state


def _remembered(state: Any, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = state[name] if _is_by_type(state) else {}
    return found
