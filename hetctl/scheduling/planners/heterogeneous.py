"""Planners on nodes with several types of GPU: each type is a separate cluster, or all are one.

A planner supports one type only. Here each member gets a type, and the planner is called once for
each; or, with the option ``mix_types``, once for all, as if each GPU were of the average of all types or,
without balanced batches, of the slowest type.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from hetctl.model.plan import Allocation
from hetctl.model.site import Node
from hetctl.model.training_settings import OFF
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Decision, Planner, Request, WaitingQueue, gpu_count
from hetctl.scheduling.planners.placement import most_on_one


@lru_cache(maxsize=256)
def by_type(planner: Planner) -> Planner:
    """Return the planner for nodes that may be of several types.

    A member stays on its first type, unless GPUs of another type would be idle. The kept state holds
    the type of each waiting member, and the planner's state for each type.
    """

    def decide(request: Request) -> Decision:
        types = _types_of(_Same(request.all_nodes))
        request = _startable(request)
        # Without any node left the types are unknown; a state by type is kept all the same.
        if types == ("",) and not _is_by_type(request.planner_state):
            return planner.decide(request)
        if request.options.mix_types:
            return _at_real_rates(request, planner.decide(_mixed(request)))
        parts = _split(request, types)
        decisions = {gpu_type: planner.decide(part) for gpu_type, part in parts.items()}
        return _merged(request, parts, decisions)

    def reasons(request: Request, decision: Decision) -> Mapping[str, str]:
        types = _types_of(_Same(request.all_nodes))
        whole, request = request, _startable(request)
        startable = {workload.name for workload in request.workloads}
        return {
            **of_startable(request, decision, types),
            **{c.name: _too_wide(c) for c in whole.workloads if c.name not in startable},
        }

    def of_startable(request: Request, decision: Decision, types: Sequence[str]) -> Mapping[str, str]:
        if types == ("",) and not _is_by_type(decision.planner_state):
            return planner.reasons(request, decision)
        if request.options.mix_types:
            return planner.reasons(_mixed(request), decision)
        return {
            name: f"on {gpu_type or 'GPUs of no known type'}, {words}"
            for gpu_type, part in _split(request, types).items()
            for name, words in planner.reasons(part, _part_of(decision, gpu_type, part)).items()
        }

    return replace(planner, decide=decide, reasons=reasons)


def _startable(request: Request) -> Request:
    """Return the request without waiting members that need more GPUs than there are, free or not."""
    most = most_for_one(request.all_nodes, mix_types=request.options.mix_types)
    # The simulator's queue knows the answer without a look at each member.
    if isinstance(request.workloads, WaitingQueue) and request.workloads.widest <= most:
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


class _Same:
    """Nodes as a cache key, compared by identity, so that a large cluster is examined only once."""

    __slots__ = ("nodes",)

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = nodes

    def __hash__(self) -> int:
        # The key holds the tuple itself, so its id is not given to another object while it is cached.
        return id(self.nodes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.nodes is other.nodes


@lru_cache(maxsize=16)
def _types_of(same: _Same) -> tuple[str, ...]:
    """Return the types of the nodes' GPUs, "" for unknown types."""
    return tuple(sorted({node.gpu_type or "" for node in same.nodes if node.gpus})) or ("",)


def _mixed(request: Request) -> Request:
    gpus = Counter[str]()
    for node in request.all_nodes:
        gpus[node.gpu_type or ""] += len(node.gpus)
    # The unary plus drops types without GPUs, which would otherwise limit the rates.
    on_all = partial(_on_types, gpus=+gpus, balance=request.options.balance != OFF)
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
        gpus = Counter[str]()
        for part in given.placement:
            gpus[types[part.node]] += len(part.gpus)
        workload = _on_types(members[given.member], gpus, balance=request.options.balance != OFF)
        return replace(given, rate=workload.rates[given.gpus])

    return replace(decision, start=tuple(at_real_rate(given) for given in decision.start))


def _on_types(workload: Workload, gpus: Mapping[str, int], *, balance: bool) -> Workload:
    """Return the member with its rates on the given GPUs of each type at once."""
    return workload.on_balanced(gpus) if balance else workload.on_slowest(gpus)


@dataclass
class _TypeQueue:
    """Members assigned to one type of GPU.

    Parameters
    ----------
    work : float
        GPU-seconds of their work on their fewest GPUs.
    """

    nodes: list[Node] = field(default_factory=list)
    free: list[Node] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    waiting: dict[str, Workload] = field(default_factory=dict)
    work: float = 0.0

    @property
    def gpus(self) -> int:
        """Number of GPUs of this type, free or not."""
        return sum(len(node.gpus) for node in self.nodes)

    @property
    def surplus(self) -> int:
        """Number of waiting members beyond the free GPUs."""
        return len(self.waiting) - sum(len(node.gpus) for node in self.free)

    @property
    def most(self) -> int:
        """Most GPUs of this type that one member can have."""
        return most_on_one([len(node.gpus) for node in self.nodes])

    @property
    def is_unused(self) -> bool:
        """True if GPUs are free and no member is assigned to them."""
        return bool(self.free) and not self.held and not self.waiting


def _split(request: Request, types: Sequence[str]) -> dict[str, Request]:
    """Return a request for each type, with the rates on that type."""
    queues = {gpu_type: _TypeQueue() for gpu_type in types}
    homes = {node.name: node.gpu_type or "" for node in request.all_nodes if node.gpus}
    for node in request.all_nodes:
        if node.gpus:
            queues[homes[node.name]].nodes.append(node)
    for node in request.nodes:
        if node.gpus:
            queues[homes[node.name]].free.append(node)
    for held in request.held:
        gpu_type = homes[held.allocation.placement[0].node]
        queues[gpu_type].held.add(held.workload.name)
        queues[gpu_type].work += _single_s(held.workload.on_type(gpu_type))
    _assign(request.workloads, queues, _remembered(request.planner_state, "members"))
    _use_idle_types(queues)
    return {gpu_type: _part(request, gpu_type, queue) for gpu_type, queue in queues.items()}


def _assign(
    workloads: Iterable[Workload], queues: Mapping[str, _TypeQueue], before: Mapping[str, str]
) -> None:
    """Assign waiting members to their former type, and new ones, the longest first, to the earliest end."""
    new = []
    for workload in workloads:
        former = before.get(workload.name, "")
        if workload.name in before and former in queues and workload.min_gpus <= queues[former].most:
            _enqueue(queues, former, workload)
        else:
            new.append(workload)
    gpus = {gpu_type: max(queue.gpus, 1) for gpu_type, queue in queues.items()}
    alone = {
        c.name: {
            gpu_type: _single_s(c.on_type(gpu_type))
            for gpu_type, queue in queues.items()
            if c.min_gpus <= queue.most
        }
        for c in new
    }

    def done_s(workload: Workload, gpu_type: str) -> float:
        on_all = (queues[gpu_type].work + alone[workload.name][gpu_type]) / gpus[gpu_type]
        return max(on_all, _least_s(workload.on_type(gpu_type), gpus[gpu_type]))

    for workload in sorted(new, key=lambda c: -min(alone[c.name].values())):
        earliest = min(alone[workload.name], key=lambda gpu_type: done_s(workload, gpu_type))
        _enqueue(queues, earliest, workload)


def _enqueue(queues: Mapping[str, _TypeQueue], gpu_type: str, workload: Workload) -> None:
    queues[gpu_type].waiting[workload.name] = workload
    queues[gpu_type].work += _single_s(workload.on_type(gpu_type))


def _use_idle_types(queues: Mapping[str, _TypeQueue]) -> None:
    """Move half of the members that cannot start elsewhere to free GPUs without members."""
    for queue in queues.values():
        if queue.is_unused:
            longest = max(queues.values(), key=lambda other: other.surplus)
            for name in list(longest.waiting)[len(longest.waiting) - -(-longest.surplus // 2) :]:
                if longest.waiting[name].min_gpus <= queue.most:
                    queue.waiting[name] = longest.waiting.pop(name)


def _part(request: Request, gpu_type: str, queue: _TypeQueue) -> Request:
    return replace(
        request,
        workloads=[c.on_type(gpu_type) for c in request.workloads if c.name in queue.waiting],
        nodes=tuple(queue.free),
        gpus=queue.gpus,
        held=tuple(
            replace(h, workload=h.workload.on_type(gpu_type))
            for h in request.held
            if h.workload.name in queue.held
        ),
        cluster=tuple(queue.nodes),
        planner_state=_remembered(request.planner_state, "gpu_types").get(gpu_type),
    )


def _merged(request: Request, parts: Mapping[str, Request], decisions: Mapping[str, Decision]) -> Decision:
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


def _part_of(decision: Decision, gpu_type: str, part: Request) -> Decision:
    """Return the part of a decision that concerns one type."""
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


def _single_s(workload: Workload) -> float:
    return workload.samples_left / workload.gpu_rate


def _least_s(workload: Workload, gpus: int) -> float:
    return workload.samples_left / max(rate for m, rate in workload.rates.items() if m <= gpus)
