"""Reasons why members got their GPUs or wait, from the planner or derived from its decision."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hetctl.model.plan import Allocation
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Decision, Planner, Request

MOST_NAMED = 3


def reasons_for(planner: Planner, request: Request, decision: Decision) -> dict[str, str]:
    """Return a reason by member: of those that start or continue, then of those that wait.

    If the planner gives none, it is the member's share of GPUs and work. Notes about members with GPUs
    are added, such as rates that were not measured.
    """
    known = {c.name: c for c in (*request.workloads, *(held.workload for held in request.held))}
    given = _given(request, decision)
    whole_s = math.fsum(_single_s(workload) for workload in known.values())
    waiting = _waiting_reason(request, given)
    reasons = {
        **{name: _reason(known[name], allocation, whole_s) for name, allocation in given.items()},
        **{name: f"waits: {waiting}" for name in known if name not in given},
        **{name: f"stops: {waiting}" for name in decision.stop if name not in given},
        **planner.reasons(request, decision),
    }
    return {
        name: "; ".join((reason, *(known[name].notes if name in given else ())))
        for name, reason in reasons.items()
    }


def _given(request: Request, decision: Decision) -> dict[str, Allocation]:
    """Return the allocation of each member after the decision is carried out."""
    left = {h.workload.name: h.allocation for h in request.held if h.workload.name not in decision.stop}
    return left | {allocation.member: allocation for allocation in decision.start}


def _reason(workload: Workload, allocation: Allocation, whole_s: float) -> str:
    efficiency = allocation.rate / (allocation.gpus * workload.rates[1])
    share = _single_s(workload) / whole_s if whole_s else 0.0
    return (
        f"{_gpus(allocation.gpus)} for {share:.0%} of the work:"
        f" {allocation.rate:.4g} samples/s, {efficiency:.0%} of linear scaling"
    )


def _single_s(workload: Workload) -> float:
    """Return the seconds of the remaining work on one GPU, which compare across different members."""
    return workload.samples_left / workload.rates[1]


def _waiting_reason(request: Request, given: Mapping[str, Allocation]) -> str:
    """Return which members have the GPUs; a local planner's request does not name those in training."""
    told = sum(held.allocation.gpus for held in request.held)
    others = request.gpus - request.free_gpus - told
    idle = request.gpus - others - sum(allocation.gpus for allocation in given.values())
    largest = sorted(given, key=lambda name: -given[name].gpus)
    holders = [f"{name} ({given[name].gpus})" for name in largest[:MOST_NAMED]]
    more = len(given) - len(holders)
    holders += [f"{more} more"] if more else []
    holders += [f"those that train on ({others})"] if others else []
    taken = f"taken by {', '.join(holders) or 'nobody'}"
    return (
        f"{idle} of {request.gpus} GPUs stay idle, the rest is {taken}" if idle else f"all GPUs are {taken}"
    )


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"
