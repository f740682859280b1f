"""The doubling heuristic of Capes et al. (section 4.2, Equation 6): powers of two, by gain per GPU.

Every member gets 1 worker, first come, first served if there are more members than GPUs. Then the
member whose time t_j = Q_j / f(w_j) falls most per added GPU is doubled, as long as GPUs are left. The
paper does this periodically and from scratch. Here it is done whenever a member comes or goes, and the
cost of a resize counts: a restart is part of t_j, and members in training get fewer GPUs only so that
all have a worker.

`exchange`, hetctl's own, then improves the greedy solution, which loses if the member that gains most needs
more GPUs than are left, or if twice as many GPUs gain nothing but four times as many do. Some members get
fewer GPUs and others more; the choice of these steps is a small knapsack problem. It is solved exactly over
the members that matter: of all that would gain, or lose, equally many GPUs, those with the largest gain, or
the least loss.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetctl.model.site import Node
from hetctl.scheduling.planners.base import Decision, Planner, Request
from hetctl.scheduling.planners.capacity import NodeCapacity
from hetctl.scheduling.planners.elastic import (
    ResizeCandidate,
    allot,
    candidates_of,
    explain,
    give,
    movable_nodes,
)

MOST_COMPARED = 8
"""Number of members considered among those that would gain, or lose, equally many GPUs."""
LEAST_S = 1e-3
"""Smallest saving in seconds for which an exchange is made."""

Change = tuple[int, float]
"""Change of a member's GPUs, and the seconds that it saves; both negative if it gets fewer."""


def double(candidates: Sequence[ResizeCandidate], nodes: Sequence[Node]) -> dict[str, int]:
    """Return GPUs by member (section 4.2): powers of two times their least, except those of fixed members."""
    counts = allot(candidates, nodes)
    left = sum(len(node.gpus) for node in nodes) - sum(counts.values())
    better = exchange(candidates, counts, left)
    # The exchange counts GPUs only; on nodes its result may not fit, unlike that of `allot`.
    return better if better == counts or _fit(better, nodes) else counts


def _fit(counts: Mapping[str, int], nodes: Sequence[Node]) -> bool:
    capacity = NodeCapacity(nodes)
    return all(capacity.change(0, gpus) for gpus in counts.values())


@dataclass(frozen=True)
class _Changes:
    """Changes of some members: those of `before`, and one of `name`."""

    gpus: int
    saved_s: float
    before: _Changes | None = None
    name: str = ""

    def changes(self) -> dict[str, int]:
        """Return the added GPUs by member."""
        found, plan = dict[str, int](), self
        while plan.before:
            found[plan.name] = plan.gpus - plan.before.gpus
            plan = plan.before
        return found


def exchange(candidates: Sequence[ResizeCandidate], counts: Mapping[str, int], left: int) -> dict[str, int]:
    """Return counts with a total time that no further exchange makes shorter.

    Members that keep their present GPUs do not get fewer.

    Parameters
    ----------
    counts : mapping of str to int
        GPUs by member, powers of two times their least, as in the result.
    left : int
        GPUs that no member has.
    """
    given = [candidate for candidate in candidates if candidate.name in counts]
    better = dict(counts)
    # Each exchange saves at least LEAST_S, so the loop ends in spite of rounding errors.
    while changed := _best(_changes(given, better), left):
        for name, gpus in changed.items():
            better[name] += gpus
            left -= gpus
    return better


def _changes(candidates: Sequence[ResizeCandidate], counts: Mapping[str, int]) -> dict[str, list[Change]]:
    """Return the changes that matter, by member."""
    by_gpus: defaultdict[int, list[tuple[float, str]]] = defaultdict(list)
    for candidate in candidates:
        before = counts[candidate.name]
        for after in _worth_trying(candidate, before):
            by_gpus[after - before].append(
                (candidate.seconds(before) - candidate.seconds(after), candidate.name)
            )
    changes: defaultdict[str, list[Change]] = defaultdict(list)
    for gpus, saved in by_gpus.items():
        for saved_s, name in heapq.nlargest(MOST_COMPARED, saved):
            changes[name].append((gpus, saved_s))
    return changes


def _worth_trying(candidate: ResizeCandidate, gpus: int) -> list[int]:
    """Return twice and four times as many GPUs if they gain anything, and half and a quarter."""
    fewer = [gpus // 2, gpus // 4] if gpus != candidate.holds and gpus in candidate.rates else []
    more = [
        other
        for other in (2 * gpus, 4 * gpus)
        if other in candidate.rates and candidate.gain(gpus, other) > 0
    ]
    return [*more, *(other for other in fewer if other in candidate.rates and other >= candidate.least)]


def _best(changes: Mapping[str, Sequence[Change]], left: int) -> dict[str, int]:
    """Return the changes that save most, at most one for each member, within the GPUs left."""
    largest = max((gpus for options in changes.values() for gpus, _ in options), default=0)
    if largest <= 0:
        return {}
    plans = [_Changes(0, 0.0)]
    for name, options in changes.items():
        tried = (
            _Changes(plan.gpus + gpus, plan.saved_s + saved_s, plan, name)
            for plan in plans
            for gpus, saved_s in options
        )
        plans = _undominated([*plans, *(plan for plan in tried if abs(plan.gpus) <= 2 * largest)])
    best = max((plan for plan in plans if plan.gpus <= left), key=lambda plan: plan.saved_s)
    return best.changes() if best.saved_s >= LEAST_S else {}


def _undominated(plans: list[_Changes]) -> list[_Changes]:
    """Return the plans that save more than all others with as few GPUs."""
    plans.sort(key=lambda plan: (plan.gpus, -plan.saved_s))
    most_s, good = -math.inf, list[_Changes]()
    for plan in plans:
        if plan.saved_s > most_s:
            most_s = plan.saved_s
            good.append(plan)
    return good


def decide(request: Request) -> Decision:
    """Give all members that are not fixed the GPUs that `double` chooses."""
    return give(request, double(candidates_of(request), movable_nodes(request)))


def reasons(request: Request, decision: Decision) -> dict[str, str]:
    """Return the gain of twice as many GPUs, and the members that wait."""
    return explain(request, decision, candidates_of(request))


DOUBLING = Planner("doubling", "elastic", decide, reasons=reasons)
