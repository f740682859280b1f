"""Exploratory variant of the doubling heuristic (Capes et al., section 7): it measures rates in training.

Of a workload's table, it uses only the rates on numbers of GPUs that the member has trained with.

With ``exploration`` *each* it is the paper's method: a new member has 8 GPUs to itself for ten minutes
and trains for 2.5 minutes on each of 1, 2, 4 and 8. With *shared*, hetctl's own, the rates of one member hold
for its family. One member of a family at a time goes through the same stages, on only the GPUs of its
stage and while every other member can have one. The others train on numbers of GPUs with known rates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.workload import Workload
from hetctl.perf.rate_extrapolation import gpu_count, rate_curve
from hetctl.scheduling.planners.base import (
    Decision,
    Planner,
    Request,
    RunningMember,
    allocations_after,
    gpus_after,
)
from hetctl.scheduling.planners.doubling import (
    ResizeCandidate,
    candidates_of,
    double,
    explain,
    movable_nodes,
    place_or_halve,
)
from hetctl.scheduling.planners.placement import NodeCapacity

STAGE_S = 150.0
"""Seconds on a number of GPUs after which its rate is known: the paper's 2.5 minutes."""
EXPLORED = 8
"""Largest number of GPUs that is explored."""

Parts = tuple[Placement, ...]


Explored = tuple[Decision, Iterable[str], Mapping[str, Parts]]
"""A decision, the members that explore, and the GPUs that they keep, used or not."""


def decide(request: Request) -> Decision:
    """Let members explore, and double those with the best gain as far as rates are known."""
    known = Known(request)
    decision, explorers, kept = (_together if known.shared else _apart)(request, known)
    ends_s = {held.workload.name: ready_s(held) for held in request.held}
    ends_s |= {started.member: request.now_s + STAGE_S for started in decision.start}
    return replace(
        decision,
        replan_at_s=min((ends_s[e] for e in explorers if ends_s.get(e, 0.0) > request.now_s), default=None),
        planner_state={
            "known": {key: sorted(counts) for key, counts in known.counts.items() if counts},
            "kept": {name: [[part.node, list(part.gpus)] for part in parts] for name, parts in kept.items()},
        },
    )


def _together(request: Request, known: Known) -> Explored:
    """Let one member of each family explore, on its stage's GPUs alone."""
    stages = _stages(request, known)
    candidates = [
        replace(candidate, rates={}, least=stages[candidate.name])
        if candidate.name in stages
        else known.candidate(candidate)
        for candidate in candidates_of(request)
    ]
    return place_or_halve(request, double(candidates, movable_nodes(request))), stages, {}


def _stages(request: Request, known: Known) -> dict[str, int]:
    """Return explorers with their GPUs, as many as leave a GPU for every other member."""
    candidates = [candidate for candidate in candidates_of(request) if not candidate.fixed]
    stages = {candidate.name: known.next_stage(candidate.workload) for candidate in candidates}
    if not any(stages.values()):
        return {}
    capacity = NodeCapacity(movable_nodes(request))
    explorers: dict[str, tuple[ResizeCandidate, int]] = {}
    for candidate in candidates:
        if not capacity.left or not capacity.change(0, candidate.least):
            continue
        stage, key = stages[candidate.name], known.key(candidate.workload)
        # The member of a family that holds its stage's GPUs goes on; the least number tells nothing.
        if stage and (key not in explorers or candidate.holds == stage > candidate.least):
            explorers[key] = candidate, stage
    # Members at their stage go first: if replaced at the next call, none would ever finish its stage.
    first = sorted(explorers.values(), key=lambda explorer: explorer[0].holds != explorer[1])
    return {candidate.name: stage for candidate, stage in first if capacity.change(candidate.least, stage)}


def _apart(request: Request, known: Known) -> Explored:
    """Let every new member explore on GPUs that it keeps for that time; others share the rest."""
    sizes = [gpus for gpus in doublings(1, EXPLORED) if NodeCapacity(request.all_nodes).change(0, gpus)]
    most = max(sizes, default=1)
    earlier = (request.planner_state or {}).get("kept", {})
    kept: dict[str, Parts] = {
        held.workload.name: tuple(Placement(node, tuple(gpus)) for node, gpus in earlier[held.workload.name])
        for held in request.held
        if held.workload.name in earlier and not held.fixed and known.next_stage(held.workload, most)
    }
    explorers = {held.workload.name: held.workload for held in request.held if held.workload.name in kept}
    rest = _without(request, kept)
    candidates = [known.candidate(candidate) for candidate in candidates_of(rest)]
    new = {
        candidate.name: replace(candidate, rates={}, least=max(_stages_of(candidate.workload, most)))
        for candidate in candidates
        if not candidate.fixed and known.next_stage(candidate.workload, most)
    }
    others = (candidate for candidate in candidates if candidate.name not in new)
    decision = place_or_halve(rest, double([*new.values(), *others], movable_nodes(rest)))
    for name, allocation in allocations_after(rest, decision).items():
        if name in new:
            explorers[name], kept[name] = new[name].workload, allocation.placement
    held_now = {held.allocation for held in request.held}
    stages = (_stage(workload, known, kept[name]) for name, workload in explorers.items())
    start = (
        *(allocation for allocation in decision.start if allocation.member not in new),
        *(allocation for allocation in stages if allocation not in held_now),
    )
    return replace(decision, start=start), kept, kept


def _stage(workload: Workload, known: Known, kept: Parts) -> Allocation:
    """Return the allocation of a member's next stage, on as few nodes as possible of those that it keeps."""
    size = sum(len(part.gpus) for part in kept)
    gpus = known.next_stage(workload, size) or size
    parts, left = list[Placement](), gpus
    for part in sorted(kept, key=lambda part: len(part.gpus), reverse=True):
        if left:
            parts.append(Placement(part.node, part.gpus[:left]))
            left -= len(parts[-1].gpus)
    return Allocation(workload.name, gpus, DATA_PARALLEL, workload.rates[gpus], tuple(parts))


def _without(request: Request, kept: Mapping[str, Parts]) -> Request:
    """Return the request without explorers and the GPUs that they keep."""
    taken = {(part.node, gpu) for parts in kept.values() for part in parts for gpu in part.gpus}
    nodes = (replace(n, gpus=tuple(g for g in n.gpus if (n.name, g) not in taken)) for n in request.nodes)
    return replace(
        request,
        nodes=tuple(node for node in nodes if node.gpus),
        held=tuple(held for held in request.held if held.workload.name not in kept),
        cluster=request.all_nodes,
    )


def reasons(request: Request, decision: Decision) -> dict[str, str]:
    """Return which members explore, and for the others the known gain."""
    known = Known(request)
    words = explain(request, decision, [known.candidate(candidate) for candidate in candidates_of(request)])
    given = gpus_after(request, decision)
    kept = decision.planner_state["kept"]
    explorers = _stages(request, known) if known.shared else kept
    for name in explorers:
        if name in given:
            words[name] = f"explores its rate on {gpu_count(given[name])}"
    for name, parts in kept.items():
        words[name] += f" of the {sum(len(gpus) for _, gpus in parts)} that are kept for it"
    return words


class Known:
    """Numbers of GPUs with known rates, by member or, if shared, by family."""

    def __init__(self, request: Request) -> None:
        self.shared = request.options.exploration == "shared"
        earlier = (request.planner_state or {}).get("known", {})
        self.counts = defaultdict(set, {key: set(counts) for key, counts in earlier.items()})
        for held in request.held:
            if request.now_s >= ready_s(held):
                self.counts[self.key(held.workload)].add(held.allocation.gpus)

    def key(self, workload: Workload) -> str:
        """Return the key of workloads with the same rates: the family, or the member itself."""
        if self.shared and workload.family:
            return f"family {workload.family}"
        return f"member {workload.name}"

    def next_stage(self, workload: Workload, limit: int = EXPLORED) -> int | None:
        """Return the first of a member's stages whose rate is to be explored; None if all are known."""
        known = self.counts[self.key(workload)]
        return next((gpus for gpus in _stages_of(workload, limit) if gpus not in known), None)

    def candidate(self, candidate: ResizeCandidate) -> ResizeCandidate:
        """Return a member with its known rates, on powers of two times its least up to the first unknown one.

        Above `EXPLORED`, rates are predicted from the known ones, as far as they surely gain.
        """
        workload, known = candidate.workload, self.counts[self.key(candidate.workload)]
        counts = tuple(doublings(workload.min_gpus, workload.max_gpus))
        tried = {gpus: workload.rates[gpus] for gpus in counts if gpus in known}
        rates = dict[int, float]()
        for gpus in counts:
            rate = tried.get(gpus)
            if rate is None and gpus > EXPLORED:
                rate = _predicted(tuple(tried.items()), workload.max_gpus).get(gpus)
            if rate is None:
                break
            rates[gpus] = rate
        return replace(candidate, rates=rates)


@lru_cache(maxsize=1 << 12)
def _predicted(tried: tuple[tuple[int, float], ...], max_gpus: int) -> dict[int, float]:
    return rate_curve(dict(tried), max_gpus).useful if tried else {}


def ready_s(held: RunningMember) -> float:
    """Return the time in seconds when the rate of a member in training is known."""
    return held.since_s + STAGE_S


def _stages_of(workload: Workload, limit: int = EXPLORED) -> Iterator[int]:
    """Yield the numbers of GPUs on which a member explores its rate: powers of two times its least."""
    return doublings(workload.min_gpus, min(limit, EXPLORED, workload.max_gpus))


def doublings(least: int, limit: int) -> Iterator[int]:
    """Yield `least`, twice as many, four times as many, .. up to `limit`."""
    gpus = least
    while gpus <= limit:
        yield gpus
        gpus *= 2


EXPLORATORY = Planner("doubling-exploratory", "elastic", decide, reasons=reasons)
