"""The doubling heuristic of Capes et al. (section 4.2, Equation 6): powers of two, by gain per GPU.

Every member gets 1 worker, first come, first served if there are more members than GPUs. Then the
member whose time t_j = Q_j / f(w_j) falls most per added GPU is doubled, as long as GPUs are left. The
paper does this periodically and from scratch. Here it is done whenever a member comes or goes, and the
cost of a resize counts: a restart is part of t_j, and members in training get fewer GPUs only so that
all have a worker.

`exchange`, hetctl's own, then improves the greedy solution. That is poor if the member that gains most needs
more GPUs than are left, or if twice as many GPUs gain nothing but four times as many do. In an exchange some
members get fewer GPUs and others more. The best one is a small knapsack problem, solved exactly over the
members that matter: for each number of GPUs, those that gain most by it or lose least.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from hetctl.model.site import Node
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload
from hetctl.perf.rate_extrapolation import gpu_count
from hetctl.scheduling.planners.base import Decision, Planner, Request, gpus_after
from hetctl.scheduling.planners.placement import NodeCapacity, place_members


@dataclass(frozen=True)
class ResizeCandidate:
    """A member with its rates, its present GPUs and the limits of a resize.

    Parameters
    ----------
    rates : mapping of int to float
        Rates by number of GPUs, in samples/s, that the planner uses.
    holds : int
        GPUs that it holds now.
    fixed : bool
        True if it keeps them.
    least : int
        Smallest number of GPUs that it can get.
    """

    workload: Workload
    rates: Mapping[int, float]
    holds: int = 0
    fixed: bool = False
    least: int = 1

    @property
    def name(self) -> str:
        """Name of the member."""
        return self.workload.name

    def seconds(self, gpus: int) -> float:
        """Return t_j = Q_j / f(w_j), plus a restart if it now holds another number of GPUs."""
        # A waiting member starts in any case, so only a change of held GPUs costs a restart.
        restart_s = self.workload.interruption_s if self.holds not in (0, gpus) else 0.0
        return self.workload.samples_left / self.rates[gpus] + restart_s

    def gain(self, before: int, after: int) -> float:
        """Return the seconds saved per added GPU (Capes et al., Equation 6)."""
        return (self.seconds(before) - self.seconds(after)) / (after - before)


def candidates_of(request: Request) -> list[ResizeCandidate]:
    """Return all members: first those in training, then the waiting ones by arrival."""
    held = [
        ResizeCandidate(h.workload, h.workload.rates, h.allocation.gpus, h.fixed, h.workload.min_gpus)
        for h in request.held
    ]
    return held + [ResizeCandidate(c, c.rates, least=c.min_gpus) for c in request.workloads]


def movable_nodes(request: Request) -> list[Node]:
    """Return nodes with the GPUs that are free or held by members that can be moved."""
    gpus: defaultdict[str, list[int]] = defaultdict(list)
    for node in request.nodes:
        gpus[node.name].extend(node.gpus)
    for held in request.held:
        for part in () if held.fixed else held.allocation.placement:
            gpus[part.node].extend(part.gpus)
    return [Node(name, tuple(here)) for name, here in gpus.items()]


def allot(candidates: Sequence[ResizeCandidate], nodes: Sequence[Node]) -> dict[str, int]:
    """Return GPUs by member: the least for each while GPUs are left, then the doublings of the largest gain.

    Members in training first grow to the number that they should keep: they shrink only so that all get
    their least number, never for the gain of others. No member overtakes one whose least number is not
    free. A member is not doubled if that gains nothing, or if the GPUs are not free on as few nodes as it
    then needs. Fixed members are left out.
    """
    capacity = NodeCapacity(nodes)
    growing = _beginning(candidates, capacity)
    counts = {candidate.name: candidate.least for candidate in growing}
    kept = {candidate.name: _kept(candidate) for candidate in growing}
    _grow([c for c in growing if kept[c.name] > c.least], counts, capacity, kept)
    _grow(growing, counts, capacity, {})
    return counts


def _beginning(candidates: Sequence[ResizeCandidate], capacity: NodeCapacity) -> list[ResizeCandidate]:
    """Return the members that get their least number of GPUs."""
    growing: list[ResizeCandidate] = []
    for candidate in candidates:
        if candidate.fixed:
            continue
        if capacity.left and capacity.change(0, candidate.least):
            growing.append(candidate)
        elif not candidate.holds and candidate.least == candidate.workload.min_gpus:
            # Otherwise members of one GPU would take every free GPU, and a wide member would come last.
            break
    return growing


def _kept(candidate: ResizeCandidate) -> int:
    """Return the best number of GPUs up to the present one, the time of a restart included."""
    best = gpus = candidate.least
    while (gpus := 2 * gpus) <= candidate.holds and gpus in candidate.rates:
        if candidate.seconds(gpus) <= candidate.seconds(best):
            best = gpus
    return best


def _grow(
    candidates: Sequence[ResizeCandidate],
    counts: dict[str, int],
    capacity: NodeCapacity,
    kept: Mapping[str, int],
) -> None:
    """Take the doubling of the largest gain repeatedly: up to `kept` in any case, beyond it if it gains."""

    def following(order: int) -> list[tuple[float, int, int]]:
        candidate = candidates[order]
        before = counts[candidate.name]
        after = 2 * before
        if after not in candidate.rates or after > kept.get(candidate.name, after):
            return []
        gain = candidate.gain(before, after)
        # The number breaks ties by arrival, and keeps the heap from comparing anything else.
        return [(-gain, order, after)] if gain > 0 or candidate.name in kept else []

    increases = [entry for order in range(len(candidates)) for entry in following(order)]
    heapq.heapify(increases)
    while increases and capacity.left:
        _, order, after = heapq.heappop(increases)
        name = candidates[order].name
        # An increase that does not fit is dropped for good: the capacity only shrinks.
        if capacity.change(counts[name], after):
            counts[name] = after
            for entry in following(order):
                heapq.heappush(increases, entry)


def place_or_halve(request: Request, counts: Mapping[str, int]) -> Decision:
    """Place members; one that does not fit is halved as often as needed."""
    workloads = [*request.workloads, *(held.workload for held in request.held)]
    least = {workload.name: workload.min_gpus for workload in workloads}
    holds = {held.workload.name: held.allocation.gpus for held in request.held}
    while True:
        decision, given = place_members(request, counts)
        # A member for which nothing is left waits: it is not among those given.
        short = {
            name: least[name] << ((gpus // least[name]).bit_length() - 1)
            for name, gpus in given.items()
            if gpus < counts.get(name, gpus)
        }
        # A member halved to the number that it holds should keep its GPUs: place all again.
        if all(given[name] == gpus != holds.get(name) for name, gpus in short.items()):
            return decision
        counts = {**counts, **short}


def explain(request: Request, decision: Decision, candidates: Sequence[ResizeCandidate]) -> dict[str, str]:
    """Return the gain of twice as many GPUs for each member with GPUs, and for the others their place."""
    given = gpus_after(request, decision)
    words, ahead = dict[str, str](), 0
    for candidate in candidates:
        if candidate.name in given:
            words[candidate.name] = _holds(candidate, given[candidate.name])
        else:
            words[candidate.name] = f"waits, {ahead} before it: {len(given)} members have a GPU each or more"
            ahead += 1
    return words


def _holds(candidate: ResizeCandidate, gpus: int) -> str:
    count, more = gpu_count(gpus), 2 * gpus
    if candidate.fixed:
        return f"{count}: it can be neither stopped nor moved"
    if more not in candidate.rates:
        return f"{count}: no rate on {more} is known"
    gain_s = candidate.gain(gpus, more)
    if gain_s <= 0:
        return f"{count}: {more} would save no time"
    return f"{count}: {more} would save {gain_s:.3g} s for each GPU more"


MOST_COMPARED = 8
"""Most members considered for each number of GPUs gained or lost."""
LEAST_SAVING_S = 1e-3
"""Smallest saving in seconds for which an exchange is made."""

Change = tuple[int, float]
"""Change of a member's GPUs, and the seconds that it saves; both negative if it gets fewer."""


def double(candidates: Sequence[ResizeCandidate], nodes: Sequence[Node]) -> dict[str, int]:
    """Return GPUs by member (section 4.2): powers of two times their least, except those of fixed members."""
    counts = allot(candidates, nodes)
    left = sum(len(node.gpus) for node in nodes) - sum(counts.values())
    better = exchange(candidates, counts, left)
    # The exchange counts GPUs only; on nodes its result may not fit, unlike that of `allot`.
    capacity = NodeCapacity(nodes)
    return better if better == counts or all(capacity.change(0, gpus) for gpus in better.values()) else counts


Plan = tuple[int, float, Any]
"""Changes of some members: GPUs and seconds saved in all, and a linked list of the changes."""


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
    # Each exchange saves at least LEAST_SAVING_S, so the loop ends in spite of rounding errors.
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
    more = (
        other
        for other in (2 * gpus, 4 * gpus)
        if other in candidate.rates and candidate.gain(gpus, other) > 0
    )
    fewer = (gpus // 2, gpus // 4) if gpus != candidate.holds and gpus in candidate.rates else ()
    return [*more, *(other for other in fewer if other in candidate.rates and other >= candidate.least)]


def _best(changes: Mapping[str, Sequence[Change]], left: int) -> dict[str, int]:
    """Return the changes that save most, at most one for each member, within the GPUs left."""
    largest = max((gpus for options in changes.values() for gpus, _ in options), default=0)
    if largest <= 0:
        return {}
    plans: list[Plan] = [(0, 0.0, ())]
    for name, options in changes.items():
        tried = (
            (before + gpus, before_s + saved_s, (name, gpus, chain))
            for before, before_s, chain in plans
            for gpus, saved_s in options
        )
        plans = _undominated([*plans, *(plan for plan in tried if abs(plan[0]) <= 2 * largest)])
    _, saved_s, chain = max((plan for plan in plans if plan[0] <= left), key=_saved_s)
    found = dict[str, int]()
    while chain and saved_s >= LEAST_SAVING_S:
        name, found[name], chain = chain
    return found


def _saved_s(plan: Plan) -> float:
    return plan[1]


def _undominated(plans: list[Plan]) -> list[Plan]:
    """Return the plans that save more than all others with as few GPUs."""
    plans.sort(key=lambda plan: (plan[0], -plan[1]))
    most_s = accumulate(map(_saved_s, plans), max, initial=-math.inf)
    return [plan for plan, before_s in zip(plans, most_s, strict=False) if plan[1] > before_s]


def decide(request: Request) -> Decision:
    """Give all members that are not fixed the GPUs that `double` chooses."""
    return place_or_halve(request, double(candidates_of(request), movable_nodes(request)))


def reasons(request: Request, decision: Decision) -> dict[str, str]:
    """Return the gain of twice as many GPUs, and the members that wait."""
    return explain(request, decision, candidates_of(request))


DOUBLING = Planner("doubling", "elastic", decide, reasons=reasons)
