"""`static`: members run once, on GPUs that never change, in an order made beforehand."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import allotment_bound, allotments_of
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import MAKESPAN, MEAN_JCT, Options, Request
from hetctl.scheduling.planners.static import (
    STATIC,
    WORK_PER_SECOND,
    IntervalModel,
    can_refine,
    decide,
    reasons,
    refine,
)
from hetctl.scheduling.planners.static_schedule import Heads, Problem, Run, in_order, list_schedule, placeable
from hetctl.scheduling.planners.static_search import improve_nodes, search
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

QUICK = Options(solver_time_limit_s=0.05)


def some_members(seed: int, count: int, gpus: int, **fields: float) -> list[Workload]:
    draw = random.Random(seed)
    members = []
    for number in range(count):
        rate, power = draw.uniform(20, 200), draw.uniform(0.3, 1.1)
        rates = {m: rate * m**power for m in range(1, gpus + 1)}
        members.append(
            Workload(f"m{number:02}", rates, draw.lognormvariate(0, 1) * 3600 * rate, **fields)  # type: ignore[arg-type]
        )
    return members


def run(
    members: Sequence[Workload], cluster: Cluster, options: Options = QUICK, planner: str = "static"
) -> Simulation:
    return simulate(planner_named(planner), [Arrival(m) for m in members], Scenario(cluster), options)


def problem_of(members: Sequence[Workload], gpus: int, per_node: int, mean: bool = False) -> Problem:
    sizes = [len(node.gpus) for node in Cluster.of(gpus, per_node).nodes]
    allotments = tuple(allotments_of(member, placeable(sizes)) for member in members)
    bound_s = allotment_bound(allotments, gpus)
    return Problem(allotments, tuple((0.0,) * size for size in sizes), bound_s, mean)


def assert_valid(result: Simulation, members: Sequence[Workload], gpus: int, per_node: int) -> None:
    """Each member once, on as few nodes as possible, and no GPU with two members."""
    assert sorted(i.member for i in result.intervals) == sorted(m.name for m in members)
    assert result.restarts == 0
    held: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for interval in result.intervals:
        parts = interval.allocation.placement
        assert len({part.node for part in parts}) == len(parts) == -(-interval.gpus // per_node)
        assert sum(len(part.gpus) for part in parts) == interval.gpus <= gpus
        for part in parts:
            for gpu in part.gpus:
                held.setdefault((part.node, gpu), []).append((interval.start_s, interval.end_s))
    for spans in held.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def constant_bound(members: Sequence[Workload], gpus: int) -> float:
    """Return a lower bound in seconds of schedules of these members without resizing."""
    allowed = range(1, gpus + 1)
    return allotment_bound([allotments_of(member, allowed) for member in members], gpus)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(1, 14),
    st.sampled_from([(1, 1), (3, 4), (6, 4), (8, 8), (10, 4), (12, 6), (16, 4)]),
    st.sampled_from([MAKESPAN, MEAN_JCT]),
)
def test_a_run_is_valid_and_no_shorter_than_its_bound(
    seed: int, count: int, size: tuple[int, int], objective: str
) -> None:
    members = some_members(seed, count, size[0])
    result = run(members, Cluster.of(*size), replace(QUICK, objective=objective))
    assert_valid(result, members, *size)
    assert result.makespan_s >= constant_bound(members, size[0]) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_never_longer_than_independent_or_a_plain_list(seed: int) -> None:
    members = some_members(seed, 12, 8)
    ours = run(members, Cluster.of(8, 4), replace(QUICK, seed=seed)).makespan_s
    assert ours <= run(members, Cluster.of(8, 4), Options(seed=seed), "independent").makespan_s * (1 + 1e-9)
    problem = problem_of(members, 8, 4)
    runs = [problem.run(i, m.within(problem.bound_s)) for i, m in enumerate(problem.members)]
    longest_first = sorted(runs, key=lambda r: -r.seconds)
    assert ours <= problem.cost(list_schedule(longest_first, problem.heads)[0]) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_mean_completion_is_never_later_than_independent(seed: int) -> None:
    members = some_members(seed, 12, 8)
    options = replace(QUICK, seed=seed, objective=MEAN_JCT)
    ours = run(members, Cluster.of(8, 4), options).mean_jct_s
    assert ours <= run(members, Cluster.of(8, 4), options, "independent").mean_jct_s * (1 + 1e-9)


def test_many_members_end_near_the_bound() -> None:
    members = some_members(3, 60, 32)
    result = run(members, Cluster.of(32, 4), Options(solver_time_limit_s=0.5))
    assert result.makespan_s <= 1.06 * constant_bound(members, 32)


def test_start_up_and_epochs_are_planned_for() -> None:
    members = some_members(1, 10, 8, startup_s=300.0, samples_per_epoch=50000, evaluate_s=20.0)
    result = run(members, Cluster.of(8, 4))
    planned = decide(Request(members, Cluster.of(8, 4).nodes, 8, 0, QUICK)).planner_state
    ends = {name: end_s for those in planned.values() for name, _, _, end_s, _ in those}
    assert {m.member: m.done_s for m in result.members} == pytest.approx(ends)


def test_the_solver_finds_what_the_lists_miss_and_is_never_worse() -> None:
    """The work of 1 s within a limit of 60 s: on a busy machine the wall-clock limit would come first."""
    members = some_members(1, 12, 16)
    problem = problem_of(members, 16, 4)
    runs = [problem.run(i, 0) for i in range(12)]
    on_one_gpu = in_order(list_schedule(runs, problem.heads)[0], problem.heads)
    assert can_refine(problem)
    refined = refine(problem, on_one_gpu, 60.0, seed=0, work_per_second=WORK_PER_SECOND / 60)
    assert problem.cost(refined) < 0.9 * problem.cost(on_one_gpu)
    assert problem.cost(refined) >= problem.bound_s
    assert refined == in_order(refined, problem.heads)


@pytest.mark.parametrize("heads", [((0.0,) * 4,) * 4, ((0.0, 0.0, 500.0, 1e6),) + ((0.0,) * 4,) * 3])
def test_the_solver_starts_from_a_schedule_that_its_model_allows(heads: Heads) -> None:
    """If the hint were refused, the solver would start from nothing without any message."""
    from ortools.sat.python import cp_model

    problem = replace(problem_of(some_members(2, 25, 16), 16, 4), heads=heads)
    hint = search(problem, [], 0.02, seed=0)
    model, solver = IntervalModel(problem, hint), cp_model.CpSolver()
    solver.parameters.fix_variables_to_their_hinted_value = True
    solver.parameters.num_workers = 1
    assert solver.solve(model.model) == cp_model.OPTIMAL
    assert problem.cost(model.schedule(solver)) == pytest.approx(problem.cost(hint), rel=1e-6)


def test_a_large_problem_is_not_for_the_solver() -> None:
    assert not can_refine(problem_of(some_members(0, 200, 64), 64, 4))


def test_annealing_moves_members_between_nodes() -> None:
    """Two members of 4 hours and four of 2 fill four GPUs, but not with the shortest first."""
    members = [Workload(f"m{i}", {1: 1.0}, hours * 3600.0) for i, hours in enumerate((2, 2, 2, 2, 4, 4))]
    problem = problem_of(members, 4, 2)
    poor = [problem.run(i, 0) for i in range(6)]
    assert problem.cost(list_schedule(poor, problem.heads)[0]) == pytest.approx(6 * 3600.0)
    assert problem.cost(improve_nodes(problem, poor, 0.05, random.Random(0))) == pytest.approx(4 * 3600.0)


def test_annealing_gives_members_more_gpus() -> None:
    members = [Workload(f"m{i}", {1: 1.0, 2: 1.8}, 36000.0) for i in range(2)]
    problem = problem_of(members, 4, 2)
    poor = [problem.run(i, 0) for i in range(2)]
    assert problem.cost(improve_nodes(problem, poor, 0.05, random.Random(0))) == pytest.approx(20000.0)


def test_three_members_of_4_gpus_need_3_nodes_of_6_or_two_turns() -> None:
    runs = [Run(i, 4, 10.0) for i in range(3)]
    for nodes, end_s in ((2, 20.0), (3, 10.0)):
        placed, _ = list_schedule(runs, ((0.0,) * 6,) * nodes)
        assert max(p.end_s for p in placed) == end_s
        assert all(len(p.parts) == 1 for p in placed)


def test_a_member_larger_than_a_node_takes_a_part_of_another() -> None:
    placed, heads = list_schedule([Run(0, 6, 10.0), Run(1, 2, 10.0), Run(2, 4, 1.0)], ((0.0,) * 4,) * 2)
    assert [sorted(gpus for _, gpus in p.parts) for p in placed] == [[2, 4], [2], [4]]
    assert [p.start_s for p in placed] == [0.0, 0.0, 10.0]
    assert sorted(heads) == [(10.0,) * 4, (11.0,) * 4]


def test_later_decisions_follow_the_plan_without_another_search(monkeypatch: pytest.MonkeyPatch) -> None:
    members, cluster = some_members(4, 100, 64), Cluster.of(64, 4)
    searches: list[Problem] = []

    def counted(problem: Problem, *arguments: Any) -> list[Run]:
        searches.append(problem)
        return search(problem, *arguments)

    monkeypatch.setattr("hetctl.scheduling.planners.static.search", counted)
    assert run(members, cluster).rounds > 5
    assert len(searches) == 1


def test_wrong_predictions_change_the_times_but_not_the_order() -> None:
    members, cluster = some_members(6, 30, 16), Cluster.of(16, 4)
    draw = random.Random(0)
    factors = {m.name: draw.uniform(0.5, 2.0) for m in members}

    def seen(known: Sequence[Workload]) -> list[Workload]:
        return [replace(c, samples_left=c.samples_left * factors[c.name]) for c in known]

    arrivals = [Arrival(m) for m in members]
    result = simulate(STATIC, arrivals, Scenario(cluster, work_estimator=seen), QUICK)
    assert_valid(result, members, 16, 4)
    assert result.makespan_s < 1.9 * constant_bound(members, 16)


def test_an_idle_node_takes_the_next_member_of_another_one() -> None:
    members, cluster = some_members(9, 2, 1), Cluster.of(2, 1)
    waiting = [[m.name, 1, 100.0 * at, 200.0, [["node-0", 1]]] for at, m in enumerate(members)]
    memory = {"waiting": waiting, "started": []}
    request = Request(members, cluster.nodes, 2, 1, QUICK, (), cluster.nodes, 0.0, memory)
    assert {a.member: a.placement[0].node for a in decide(request).start} == {
        "m00": "node-0",
        "m01": "node-1",
    }


def test_no_member_overtakes_one_that_waits_for_its_node() -> None:
    members, cluster = some_members(9, 2, 4), Cluster.of(4, 4)
    waiting = [["m00", 4, 0.0, 9.0, [["node-0", 4]]], ["m01", 1, 9.0, 10.0, [["node-0", 1]]]]
    free = (replace(cluster.nodes[0], gpus=(0, 1)),)
    request = Request(members, free, 4, 1, QUICK, (), cluster.nodes, 0.0, {"waiting": waiting, "started": []})
    assert decide(request).start == ()


def test_reasons_say_how_many_gpus_and_when() -> None:
    members, cluster = some_members(2, 12, 4), Cluster.of(4, 4)
    request = Request(members, cluster.nodes, 4, 0, QUICK)
    decision = decide(request)
    said = reasons(request, decision)
    assert set(said) == {m.name for m in members}
    for allocation in decision.start:
        assert said[allocation.member].startswith(f"{allocation.gpus} GPU")
    assert sum("planned for" in words for words in said.values()) == 12 - len(decision.start)


def test_ten_thousand_members_on_a_hundred_thousand_gpus() -> None:
    curves = [{m: 50.0 * m**power for m in range(1, 17)} for power in (0.7, 0.8, 0.9)]
    draw = random.Random(0)
    members = [Workload(f"m{i}", draw.choice(curves), draw.lognormvariate(0, 1) * 1e6) for i in range(10_000)]
    request = Request(members, Cluster.of(100_000, 4).nodes, 100_000, 0, Options(solver_time_limit_s=0.5))
    assert len(decide(request).start) == 10_000
