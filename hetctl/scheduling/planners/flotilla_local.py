"""FLEET-L (section 4.3.3): as `flotilla`, but GPUs that become free are used again at once.

Their members are found by the same greedy algorithm on those GPUs and the remaining members alone,
while all others continue to train.
"""

from __future__ import annotations

from hetctl.scheduling.planners.base import Decision, Planner, Request
from hetctl.scheduling.planners.flotilla import decide


def reasons(request: Request, decision: Decision) -> dict[str, str]:
    """Return the rates of members that start, beside the rate that they were chosen by."""
    if not decision.start:
        return {}
    fastest = max(request.workloads, key=lambda workload: workload.rates[1])
    beside = f"chosen by {fastest.name}, the fastest left, with {fastest.rates[1]:.4g} on one GPU"
    words = {
        a.member: f"{a.gpus} of {request.free_gpus} GPUs: {a.rate:.4g} samples/s, {beside}"
        for a in decision.start
    }
    waiting = (workload.name for workload in request.workloads if workload.name not in words)
    return words | dict.fromkeys(waiting, f"waits for freed GPUs: others are nearer to {fastest.name}")


FLOTILLA_LOCAL = Planner("flotilla-local", "local", decide, shares=True, reasons=reasons, alpha=0.0)
