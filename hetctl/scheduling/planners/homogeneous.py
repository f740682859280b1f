"""Training of homogeneous ensembles (Pittman et al.), as in the comparison of FLEET (section 6.1).

A random set of the remaining members trains with shared data, one GPU each; the next set begins
when all of it are done. Sets follow one another in the order in which `independent` draws members.
"""

from __future__ import annotations

from hetctl.scheduling.planners.base import Decision, Planner, Request
from hetctl.scheduling.planners.independent import decide, drawn


def reasons(request: Request, decision: Decision) -> dict[str, str]:
    """Return the members of the set, and the number of sets before each waiting one."""
    size = len(decision.start)
    words = {a.member: f"1 GPU: drawn into this set of {size}" for a in decision.start}
    waiting = (workload.name for workload in request.workloads if workload.name not in words)
    return words | {
        name: f"waits for this set and {place // max(size, 1)} more: {place} drawn before it"
        for place, name in enumerate(waiting)
    }


HOMOGENEOUS = Planner("homogeneous", "global", decide, shares=True, order=drawn, reasons=reasons, alpha=0.0)
