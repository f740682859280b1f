"""Properties of every planner."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from hetctl.model.plan import Allocation
from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster, Node
from hetctl.model.workload import Workload
from hetctl.perf.bounds import makespan_bound, mean_jct_bound
from hetctl.perf.epoch_timeline import least_task_s
from hetctl.perf.rate_extrapolation import rate_curve
from hetctl.scheduling.planners import PLANNERS, planner_named
from hetctl.scheduling.planners.base import OBJECTIVES, Decision, Options, Planner, Request, RunningMember
from hetctl.scheduling.planners.heterogeneous import most_for_one
from hetctl.scheduling.planners.packing import pack
from hetctl.scheduling.simulate.scenario import Arrival, Failures, JobTiming, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

SLOW = [PLANNERS["static"]]
"""Planners that use all the time that they are given."""
OTHERS = [planner for planner in PLANNERS.values() if planner not in SLOW]
OTHERS += [planner_named(name) for name in ("fixed-1", "fixed-3")]
every_planner = pytest.mark.parametrize("planners", [SLOW, OTHERS], ids=["slow", "others"])
CLOSE = 1e-9


def examples(
    planners: list[Planner], count: int, **strategies: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], None]:
    """Run a check of each planner on that many examples, on half of them on a server, on fewer for slow ones.

    To draw an example takes several times as long as to plan for it.
    """
    count = count * settings.default.max_examples // 100

    def run(check: Callable[..., None]) -> None:
        def check_all(**drawn: Any) -> None:
            for planner in planners:
                note(planner.name)
                check(planner, **drawn)

        checks = HealthCheck.too_slow, HealthCheck.data_too_large
        decorated = settings(
            max_examples=max(3, count // 20) if planners is SLOW else count,
            deadline=None,
            suppress_health_check=checks,
        )(given(**strategies)(check_all))
        decorated()

    return run


curves = st.lists(st.floats(1.0, 500.0), min_size=1, max_size=20).map(
    lambda values: dict(enumerate(values, start=1))
)
fewest = st.sampled_from([1, 1, 1, 2, 3, 4, 8])


def from_least(rates: dict[int, float], least: int) -> dict[int, float]:
    """Return the rates from `least` GPUs up, or that on the largest number alone."""
    return {gpus: rate for gpus, rate in rates.items() if gpus >= min(least, max(rates))}


members = st.lists(st.tuples(curves, fewest, st.floats(1.0, 1e6), st.floats(0.0, 100.0)), max_size=12).map(
    lambda found: tuple(
        Workload(f"m{i:02}", from_least(rates, least), left, startup_s=startup_s, family=f"f{i % 3}")
        for i, (rates, least, left, startup_s) in enumerate(found)
    )
)
clusters = st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=1, max_size=5).map(
    lambda found: tuple(Node(f"n{i}", tuple(sorted(gpus))) for i, gpus in enumerate(found))
)
options = st.builds(
    Options,
    delta=st.none() | st.floats(0.1, 500.0),
    relative_delta=st.floats(0.01, 2.0),
    max_permutations=st.integers(1, 100),
    seed=st.integers(),
    objective=st.sampled_from(OBJECTIVES),
    exploration=st.sampled_from(["shared", "each"]),
    solver_time_limit_s=st.just(0.02),
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Draw a cluster on which some members may be in training."""
    workloads, cluster = draw(members), draw(clusters)
    wishes = draw(st.lists(st.integers(0, 9), min_size=len(workloads), max_size=len(workloads)))
    if draw(st.booleans()):
        wishes = [0] * len(wishes)
    counts = [
        (c.name, max(min(wish, c.max_gpus), c.min_gpus))
        for c, wish in zip(workloads, wishes, strict=True)
        if wish
    ]
    placements, _ = pack(counts, cluster, 1)
    by_name = {c.name: c for c in workloads}
    held = tuple(
        RunningMember(
            by_name[name], allocation(by_name[name], parts), draw(st.floats(0.0, 900.0)), draw(st.booleans())
        )
        for name, parts in placements.items()
    )
    taken = {(p.node, gpu) for parts in placements.values() for p in parts for gpu in p.gpus}
    free = (Node(n.name, tuple(g for g in n.gpus if (n.name, g) not in taken)) for n in cluster)
    return Request(
        workloads=[c for c in workloads if c.name not in placements],
        nodes=tuple(node for node in free if node.gpus),
        gpus=sum(len(node.gpus) for node in cluster),
        round_index=draw(st.integers(0, 9)),
        options=draw(options),
        held=held,
        cluster=cluster,
        now_s=900.0,
    )


def as_asked(planner: Planner, request: Request) -> Request:
    """Return what a planner is asked: an elastic one sees who trains, a global one is asked in between."""
    if planner.paradigm == "elastic":
        return request
    if planner.paradigm == "local":
        return replace(request, held=())
    workloads = [*request.workloads, *(h.workload for h in request.held)]
    return replace(request, workloads=workloads, nodes=request.all_nodes, held=())


def allocation(workload: Workload, parts: Any) -> Allocation:
    gpus = sum(len(part.gpus) for part in parts)
    return Allocation(workload.name, gpus, "data-parallel", workload.rates[gpus], parts)


def gpus_of(allocations: Iterable[Allocation]) -> list[tuple[str, int]]:
    return [(p.node, gpu) for a in allocations for p in a.placement for gpu in p.gpus]


def names_of(request: Request) -> set[str]:
    return {c.name for c in request.workloads} | {h.workload.name for h in request.held}


def check_members(request: Request, decision: Decision) -> None:
    started = [a.member for a in decision.start]
    movable = {h.workload.name for h in request.held if not h.fixed}
    waiting = {c.name for c in request.workloads}
    assert len(set(started)) == len(started)
    assert set(started) <= waiting | movable
    assert set(decision.stop) <= movable - set(started)
    held = {h.workload.name: h.allocation for h in request.held}
    assert all(held.get(a.member) != a for a in decision.start)


def check_gpus(request: Request, decision: Decision) -> None:
    touched = {*decision.stop, *(a.member for a in decision.start)}
    kept = [h.allocation for h in request.held if h.workload.name not in touched]
    freed = [h.allocation for h in request.held if h.workload.name in touched]
    used, free = gpus_of(decision.start), {(n.name, gpu) for n in request.nodes for gpu in n.gpus}
    assert set(used) <= free | set(gpus_of(freed))
    whole = used + gpus_of(kept)
    assert len(whole) == len(set(whole)) <= request.gpus


def check_allocations(request: Request, decision: Decision) -> None:
    curves = {c.name: c.rates for c in (*request.workloads, *(h.workload for h in request.held))}
    for given_ in decision.start:
        assert given_.gpus == len(gpus_of([given_])) >= 1
        assert given_.rate == curves[given_.member][given_.gpus]
        assert all(part.gpus for part in given_.placement)


def check_nodes(request: Request, decision: Decision) -> None:
    sums = list(accumulate(sorted((len(node.gpus) for node in request.all_nodes), reverse=True)))
    for given_ in decision.start:
        fewest = next(n for n, gpus in enumerate(sums, start=1) if gpus >= given_.gpus)
        assert len(given_.placement) == len({part.node for part in given_.placement}) == fewest


def check_somebody_trains(request: Request, decision: Decision) -> None:
    if not request.held and request.free_gpus == request.gpus:
        most = most_for_one(request.all_nodes, mix_types=False)
        assert bool(decision.start) is any(c.min_gpus <= most for c in request.workloads)


def check_memory(request: Request, decision: Decision) -> None:
    assert json.loads(json.dumps(decision.planner_state)) == decision.planner_state
    assert decision.replan_at_s is None or decision.replan_at_s > request.now_s


def check_reasons(planner: Planner, request: Request, decision: Decision) -> None:
    words = planner.reasons(request, decision)
    assert set(words) <= names_of(request)
    assert all(words.values())


CHECKS = check_members, check_gpus, check_allocations, check_nodes, check_somebody_trains, check_memory


@every_planner
def test_a_decision_and_the_next_one_with_its_state_keep_to_the_protocol(planners: list[Planner]) -> None:
    @examples(planners, 150, drawn=requests(), later_s=st.floats(0.0, 1000.0))
    def check(planner: Planner, drawn: Request, later_s: float) -> None:
        request = as_asked(planner, drawn)
        first = planner.decide(request)
        for each in CHECKS:
            each(request, first)
        check_reasons(planner, request, first)
        again = after(planner, request, first, later_s)
        second = planner.decide(again)
        for each in CHECKS:
            if each is not check_somebody_trains:
                each(again, second)


def after(planner: Planner, request: Request, decision: Decision, later_s: float) -> Request:
    """Return the request when the decision has been carried out."""
    by_name = {c.name: c for c in (*request.workloads, *(h.workload for h in request.held))}
    touched = {*decision.stop, *(a.member for a in decision.start)}
    held = [h for h in request.held if h.workload.name not in touched]
    held += [RunningMember(by_name[a.member], a, request.now_s) for a in decision.start]
    freed = [h.allocation for h in request.held if h.workload.name in touched]
    free = {(n.name, gpu) for n in request.nodes for gpu in n.gpus} | set(gpus_of(freed))
    free -= set(gpus_of(decision.start))
    training = {h.workload.name for h in held}
    return replace(
        request,
        workloads=[c for c in by_name.values() if c.name not in training],
        nodes=tuple(
            node
            for whole in request.all_nodes
            if (node := Node(whole.name, tuple(g for g in whole.gpus if (whole.name, g) in free))).gpus
        ),
        held=tuple(held) if planner.paradigm == "elastic" else (),
        now_s=request.now_s + later_s,
        planner_state=json.loads(json.dumps(decision.planner_state)),
    )


@every_planner
def test_the_same_question_has_the_same_answer(planners: list[Planner]) -> None:
    few = members.map(lambda found: found[:3])
    asked = st.builds(
        Request,
        few,
        clusters.map(lambda nodes: nodes[:2]),
        gpus=st.just(16),
        round_index=st.just(0),
        options=options.map(lambda found: replace(found, solver_time_limit_s=0.2)),
    )

    @examples(planners, 60, request=asked)
    def check(planner: Planner, request: Request) -> None:
        assert planner.decide(request) == planner.decide(request)


worlds = st.builds(
    Scenario,
    cluster=st.builds(Cluster.of, st.integers(3, 10), st.integers(1, 4)),
    lockstep=st.booleans(),
)


@st.composite
def arrivals_of(draw: st.DrawFn, most: int) -> list[Arrival]:
    """Draw members of up to 6 GPUs and about a minute to an hour, that come over time or all at once.

    Some of them need two or three GPUs at least, and were measured on some numbers of GPUs only.
    """
    arrivals = []
    for number in range(draw(st.integers(1, most))):
        single, power, limit = draw(st.floats(1.0, 10.0)), draw(st.floats(0.3, 1.1)), draw(st.integers(1, 6))
        measured = draw(st.sets(st.integers(1, limit), min_size=1, max_size=2))
        least = min(draw(st.sampled_from([1, 1, 2, 3])), limit)
        curve = rate_curve({gpus: single * gpus**power for gpus in measured}, limit, least)
        member = Workload(
            f"m{number}",
            curve.useful,
            draw(st.floats(200.0, 6000.0)),
            draw(st.none() | st.integers(100, 1000)),
            startup_s=draw(st.floats(0.0, 10.0)),
            evaluate_s=draw(st.floats(0.0, 5.0)),
            checkpoint_s=draw(st.floats(0.0, 5.0)),
            restart_s=draw(st.none() | st.floats(0.0, 20.0)),
            family=f"f{number % 2}",
            spread={gpus: error for gpus, error in curve.spread.items() if gpus in curve.useful},
        )
        arrivals.append(Arrival(member, draw(st.sampled_from([0.0, 0.0, 50.0, 400.0]))))
    return arrivals


def check_run(arrivals: list[Arrival], scenario: Scenario, result: Simulation) -> None:
    trained: dict[str, float] = defaultdict(float)
    busy: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for interval in result.intervals:
        trained[interval.member] += interval.samples
        for gpu in gpus_of([interval.allocation]):
            busy[gpu].append((interval.start_s, interval.end_s))
    assert trained == {a.workload.name: pytest.approx(a.workload.samples_left) for a in arrivals}
    for spans in busy.values():
        assert all(before[1] <= after_[0] + 1e-6 for before, after_ in pairwise(sorted(spans)))
    jobs = [(a.at_s, a.workload) for a in arrivals]
    assert result.makespan_s >= makespan_bound(jobs, scenario.cluster.gpus) * (1 - CLOSE)
    assert result.mean_jct_s >= mean_jct_bound(jobs, scenario.cluster.gpus) * (1 - CLOSE)


def longest_task_s(workload: Workload) -> float:
    """Return the seconds for a whole epoch, at worst."""
    startup_s = max(workload.startup_s, workload.restart_s or 0.0)
    left = workload.samples_per_epoch or workload.samples_left
    whole = replace(workload, samples_left=float(left), startup_s=startup_s)
    return least_task_s(whole, min(workload.rates.values()))


@every_planner
@pytest.mark.parametrize("trouble", ["none", "a round limit", "failing nodes"])
def test_a_whole_run_trains_every_member_once(planners: list[Planner], trouble: str) -> None:
    @examples(
        planners,
        40 if trouble == "none" else 20,
        arrivals=arrivals_of(4 if planners is SLOW else 8),
        scenario=worlds,
        options=options,
        spare=st.floats(1.1, 3.0),
        seed=st.integers(0, 99),
    )
    def check(
        planner: Planner,
        arrivals: list[Arrival],
        scenario: Scenario,
        options: Options,
        spare: float,
        seed: int,
    ) -> None:
        if trouble == "a round limit":
            longest_s = max(longest_task_s(arrival.workload) for arrival in arrivals)
            scenario = replace(scenario, timing=JobTiming(spare * longest_s + 10.0, 5.0, 0.5, 3.0))
        elif trouble == "failing nodes":
            failures = Failures(3000.0, repair_s=100.0, checkpoint_every_s=60.0, seed=seed)
            scenario = replace(scenario, failures=failures)
        check_run(arrivals, scenario, simulate(planner, arrivals, scenario, options))
