"""Exploratory variant of the doubling heuristic (Capes et al., section 7): rates are not known before.

Only rates on numbers of GPUs that a member has trained with count; other entries of the workloads'
tables are not used.

With ``exploration`` *each* it is the paper's method: a new member has 8 GPUs to itself for ten minutes
and trains for 2.5 minutes on each of 1, 2, 4 and 8. With *shared*, hetctl's own, the rates of one member hold
for its family; one member of a family at a time goes through the same stages, on no more GPUs than
the stage takes and only as long as all others can have one. These train on as many GPUs as have known
rates by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.workload import Workload
from hetctl.perf.rate_extrapolation import rate_curve
from hetctl.scheduling.planners.base import Decision, Held, Planner, Request, allocations_after, gpu_count
from hetctl.scheduling.planners.doubling import (
    ResizeCandidate,
    candidates_of,
    double,
    explain,
    give,
    gpus_after,
    movable_nodes,
)
from hetctl.scheduling.planners.placement import NodeCapacity

STAGE_S = 150.0
"""Seconds on a number of GPUs after which its rate is known: the paper's 2.5 minutes."""
EXPLORED = 8
"""Largest number of GPUs that is explored."""

Parts = tuple[Placement, ...]


@dataclass(frozen=True)
class Exploration:
    """A decision, the members that explore, and the GPUs that they keep, used or not."""

    decision: Decision
    explorers: Sequence[str]
    kept: Mapping[str, Parts]


def decide(request: Request) -> Decision:
    """Let members explore, and double those with the best gain as far as rates are known."""
    request = _with_unsure(request)
    known = _known(request)
    exploration = _together(request, known) if _shared(request) else _apart(request, known)
    kept = {
        name: [[part.node, list(part.gpus)] for part in parts] for name, parts in exploration.kept.items()
    }
    return replace(
        exploration.decision,
        replan_at_s=_stage_ends_s(request, exploration),
        planner_state={"known": known.counts(), "kept": kept},
    )


def _with_unsure(request: Request) -> Request:
    """Return the request with all rates of its members: those that are not sure are to be explored."""
    return replace(
        request,
        workloads=tuple(map(_explorable, request.workloads)),
        held=tuple(replace(held, workload=_explorable(held.workload)) for held in request.held),
    )


def _explorable(workload: Workload) -> Workload:
    return replace(workload, rates={**workload.rates, **workload.unsure}) if workload.unsure else workload


def _shared(request: Request) -> bool:
    return request.options.exploration == "shared"


def _known(request: Request) -> Known:
    known = Known(_shared(request), (request.planner_state or {}).get("known", {}))
    known.learn(request.held, request.now_s)
    return known


def _stage_ends_s(request: Request, exploration: Exploration) -> float | None:
    ends = {h.workload.name: ready_s(h) for h in request.held}
    ends.update((a.member, request.now_s + STAGE_S) for a in exploration.decision.start)
    return min((ends[e] for e in exploration.explorers if ends.get(e, 0.0) > request.now_s), default=None)


def _together(request: Request, known: Known) -> Exploration:
    """Let one member of each family explore, on its stage's GPUs alone."""
    stages = _stages(request, known)
    candidates = [
        replace(candidate, rates={}, least=stages[candidate.name])
        if candidate.name in stages
        else known.candidate(candidate)
        for candidate in candidates_of(request)
    ]
    counts = double(candidates, movable_nodes(request))
    return Exploration(give(request, counts), tuple(stages), {})


def _stages(request: Request, known: Known) -> dict[str, int]:
    """Return explorers with their GPUs, as long as all members can have a GPU beside them."""
    candidates = candidates_of(request)
    stages = {
        candidate.name: known.next_stage(candidate.workload)
        for candidate in candidates
        if not candidate.fixed
    }
    if not any(stages.values()):
        return {}
    capacity = NodeCapacity(movable_nodes(request))
    explorers: dict[str, tuple[ResizeCandidate, int]] = {}
    for candidate in candidates:
        if candidate.fixed or not capacity.left or not capacity.change(0, candidate.least):
            continue
        stage, key = stages[candidate.name], known.key(candidate.workload)
        # Of a family the member that already holds its stage's GPUs goes on; the least is what all have.
        if stage and (key not in explorers or candidate.holds == stage > candidate.least):
            explorers[key] = candidate, stage
    # Members at their stage go first: if replaced at the next call, none would ever finish its stage.
    first = sorted(explorers.values(), key=lambda explorer: explorer[0].holds != explorer[1])
    return {candidate.name: stage for candidate, stage in first if capacity.change(candidate.least, stage)}


def _apart(request: Request, known: Known) -> Exploration:
    """Let every new member explore on GPUs that it keeps for that time; others share the rest."""
    most = _most(request)
    kept, resized = _continue_exploring(request, known, most)
    rest = _without(request, kept)
    candidates = [known.candidate(candidate) for candidate in candidates_of(rest)]
    new = {
        candidate.name: replace(candidate, rates={}, least=max(_stages_of(candidate.workload, most)))
        for candidate in candidates
        if not candidate.fixed and known.next_stage(candidate.workload, most)
    }
    counts = double(
        [*new.values(), *(candidate for candidate in candidates if candidate.name not in new)],
        movable_nodes(rest),
    )
    decision = give(rest, counts)
    others = [allocation for allocation in decision.start if allocation.member not in new]
    for name, allocation in allocations_after(rest, decision).items():
        if name in new:
            kept[name] = allocation.placement
            resized.append(_stage(new[name].workload, known, kept[name]))
    held = {h.allocation for h in request.held}
    start = (*others, *(allocation for allocation in resized if allocation not in held))
    return Exploration(replace(decision, start=start), tuple(kept), kept)


def _continue_exploring(
    request: Request, known: Known, most: int
) -> tuple[dict[str, Parts], list[Allocation]]:
    """Return members that still explore with the GPUs that they keep, and the allocations of their stages."""
    earlier = (request.planner_state or {}).get("kept", {})
    kept, stages = dict[str, Parts](), list[Allocation]()
    for held in request.held:
        name = held.workload.name
        if name in earlier and not held.fixed and known.next_stage(held.workload, most):
            kept[name] = tuple(Placement(node, tuple(gpus)) for node, gpus in earlier[name])
            stages.append(_stage(held.workload, known, kept[name]))
    return kept, stages


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


def _most(request: Request) -> int:
    """Return the largest number of GPUs that one member can explore on an empty cluster."""
    sizes = [gpus for gpus in doublings(1, EXPLORED) if NodeCapacity(request.all_nodes).change(0, gpus)]
    return max(sizes, default=1)


def reasons(request: Request, decision: Decision) -> dict[str, str]:
    """Return which members explore, and for the others the known gain."""
    request = _with_unsure(request)
    known = _known(request)
    words = explain(request, decision, [known.candidate(candidate) for candidate in candidates_of(request)])
    given = gpus_after(request, decision)
    kept = decision.planner_state["kept"]
    explorers = _stages(request, known) if _shared(request) else kept
    for name in explorers:
        if name in given:
            words[name] = f"explores its rate on {gpu_count(given[name])}"
    for name, parts in kept.items():
        words[name] += f" of the {sum(len(gpus) for _, gpus in parts)} that are kept for it"
    return words


class Known:
    """Numbers of GPUs with known rates, by member or, if shared, by family."""

    def __init__(self, shared: bool, counts: Mapping[str, list[int]]) -> None:
        self._shared = shared
        self._counts = defaultdict(set, {key: set(counts) for key, counts in counts.items()})

    def learn(self, held: Iterable[Held], now_s: float) -> None:
        """Add the numbers of GPUs that members have trained with for long enough by now."""
        for member in held:
            if now_s >= ready_s(member):
                self._counts[self.key(member.workload)].add(member.allocation.gpus)

    def key(self, workload: Workload) -> str:
        """Return the key of workloads with the same rates: the family, or the member itself."""
        if self._shared and workload.family:
            return f"family {workload.family}"
        return f"member {workload.name}"

    def next_stage(self, workload: Workload, limit: int = EXPLORED) -> int | None:
        """Return the first of a member's stages whose rate is to be explored; None if all are known."""
        known = self._counts[self.key(workload)]
        return next((gpus for gpus in _stages_of(workload, limit) if gpus not in known), None)

    def rates(self, workload: Workload) -> dict[int, float]:
        """Return the rates on powers of two times its least, up to the first that is still to be explored.

        Above `EXPLORED` the others are predicted from the known rates, as far as they surely gain.
        """
        known = self._counts[self.key(workload)]
        counts = tuple(doublings(workload.min_gpus, workload.max_gpus))
        tried = {gpus: workload.rates[gpus] for gpus in counts if gpus in known}
        rates: dict[int, float] = {}
        for gpus in counts:
            if gpus in tried:
                rates[gpus] = tried[gpus]
            elif gpus > EXPLORED and gpus in (
                predicted := _predicted(tuple(tried.items()), workload.max_gpus)
            ):
                rates[gpus] = predicted[gpus]
            else:
                break
        return rates

    def candidate(self, candidate: ResizeCandidate) -> ResizeCandidate:
        """Return a member with its known rates only."""
        return replace(candidate, rates=self.rates(candidate.workload))

    def counts(self) -> dict[str, list[int]]:
        """Return the state to be kept."""
        return {key: sorted(counts) for key, counts in self._counts.items() if counts}


@lru_cache(maxsize=1 << 12)
def _predicted(tried: tuple[tuple[int, float], ...], max_gpus: int) -> dict[int, float]:
    return rate_curve(dict(tried), max_gpus).useful if tried else {}


def ready_s(held: Held) -> float:
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
