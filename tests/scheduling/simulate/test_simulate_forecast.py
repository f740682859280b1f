from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.errors import InfeasibleError
from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement, Plan
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.perf.bounds import fluid_bound
from hetctl.scheduling.planners import PLANNERS
from hetctl.scheduling.planners.base import Decision, Options, Planner, Request, RunningMember
from hetctl.scheduling.simulate.forecast import forecast, reasons_for
from hetctl.scheduling.simulate.scenario import JobTiming, Scenario

FLOTILLA, INDEPENDENT = PLANNERS["flotilla"], PLANNERS["independent"]
A, B, C = (
    Workload("a", {1: 10.0, 2: 18.0}, 300.0),
    Workload("b", {1: 10.0, 2: 20.0}, 100.0, notes=("proportional above 1 GPU: one point was measured",)),
    Workload("c", {1: 10.0}, 600.0),
)
CLUSTER = Cluster.of(4, 4)
SILENT = Planner("silent", "global", lambda _: Decision())


def in_order(request: Request) -> Decision:
    """One GPU each, as the workloads come."""
    free = [(node.name, gpu) for node in request.nodes for gpu in node.gpus]
    return Decision(
        tuple(
            Allocation(c.name, 1, "data-parallel", c.rates[1], (Placement(node, (gpu,)),))
            for c, (node, gpu) in zip(request.workloads, free, strict=False)
        )
    )


LOCAL = Planner("local", "local", in_order, trains_as_group=False)
GLOBAL = Planner("global", "global", in_order, trains_as_group=False)


def predict(
    planner: Planner,
    members: Sequence[Workload],
    gpus: int,
    *,
    options: Options = Options(delta=20.0),  # noqa: B008
    wall_s: float | None = None,
    grace_s: float = 0.0,
) -> Plan:
    scenario = Scenario(Cluster.of(gpus, 4), JobTiming(wall_s, grace_s, 1.0, 5.0))
    return forecast(planner, members, scenario, options)


def member(name: str, rates: Sequence[float], left: float, **values: float) -> Workload:
    return Workload(name, dict(enumerate(rates, start=1)), left, **values)  # type: ignore[arg-type]


def gpus_by_round(plan: Plan) -> list[dict[str, int]]:
    return [{a.member: a.gpus for a in round_.allocations} for round_ in plan.rounds]


def test_flotillas_are_those_worked_out_by_hand() -> None:
    """Three rounds on 4 GPUs, delta 20, alpha 0.8, worked out from FLEET's rules.

    Round 0: a is the reference at 100, b joins on 2 GPUs at 100, c would need 4 of the 1 left; the
    GPU left over goes to a (180). a is done at 1000/180 = 5.56 s; then 2 < 0.8 * 4 GPUs are active.
    Round 1, from 6.56 s: b is the reference at 50, c joins on 2 at 50, and b as slowest gets the GPU
    left over (100). b's 1500 - 555.6 samples are done 9.44 s later, at 16 s.
    Round 2, from 17 s: c has 800 - 472.2 samples left and all GPUs, at 80.
    """
    members = (
        member("a", [100, 180], 1000),
        member("b", [50, 100, 130], 1500),
        member("c", [30, 50, 65, 80], 800),
    )
    plan = predict(FLOTILLA, members, 4)
    assert gpus_by_round(plan) == [{"a": 2, "b": 2}, {"b": 2, "c": 2}, {"c": 4}]
    first = 1000 / 180
    assert [r.start_s for r in plan.rounds] == pytest.approx([0, first + 1, 17])
    assert [r.predicted_s for r in plan.rounds] == pytest.approx([first, 15 - first, 327.7778 / 80])
    assert [f.done_s for f in plan.members] == pytest.approx([first, 16, 17 + 327.7778 / 80])
    assert [f.training_s for f in plan.members] == pytest.approx([first, 15, 15 - first + 327.7778 / 80])
    assert plan.predicted_makespan_s == pytest.approx(21.0972222)
    assert plan.lower_bound_s == fluid_bound(members, 4)
    assert plan.ratio == plan.predicted_makespan_s / plan.lower_bound_s
    assert (plan.planner, plan.objective, plan.gpus, plan.gpus_per_node) == ("flotilla", "makespan", 4, 4)
    assert plan.options["delta"] == 20.0


def test_at_alpha_0_a_flotilla_ends_with_its_last_member() -> None:
    members = (member("a", [100], 1000), member("b", [100], 2000), member("c", [100], 500))
    plan = predict(FLOTILLA, members, 2, options=Options(alpha=0.0))
    assert gpus_by_round(plan) == [{"a": 1, "b": 1}, {"c": 1}]
    assert [r.start_s for r in plan.rounds] == [0, 21]


def test_members_that_cannot_get_more_gpus_are_not_stopped() -> None:
    members = (member("a", [100], 1000), member("b", [100], 2000))
    assert len(predict(FLOTILLA, members, 2).rounds) == 1


def test_a_stop_costs_a_checkpoint_and_a_start_up() -> None:
    members = (member("a", [100], 1000), member("b", [100, 200], 2000, checkpoint_s=2.0, startup_s=3.0))
    plan = predict(FLOTILLA, members, 2)
    # b has trained 7 s when a is done at 10, saves until 12, starts up until 16 and has 1300 left.
    assert plan.rounds[1].start_s == 13
    assert plan.predicted_makespan_s == pytest.approx(16 + 1300 / 200 + 2)


def test_a_local_round_begins_before_the_other_has_ended() -> None:
    members = (member("a", [10], 100), member("b", [10], 200), member("c", [10], 100))
    plan = predict(LOCAL, members, 2)
    assert [(r.start_s, r.predicted_s) for r in plan.rounds] == [(0, 20), (11, 10)]
    assert plan.rounds[1].allocations[0].placement == plan.rounds[0].allocations[0].placement


def test_members_of_one_shape_train_at_the_rate_of_all_together() -> None:
    """Four at twice the rate of one, of which three and then two are left, and then one."""
    four = [member(name, [10], 100 * left) for name, left in zip("abcd", (1, 1, 2, 3), strict=True)]
    four = [replace(one, fuses="small", fused={1: 50.0, 4: 100.0}) for one in four]
    plan = predict(LOCAL, [*four, member("x", [10], 100)], 1)
    (together, *later) = gpus_by_round(plan)
    assert (together, later) == (dict.fromkeys("abcd", 1), [{"x": 1}])
    # Two of them are 2 ** 0.5 times as fast as one.
    ends = 20.0, 20.0, 20.0 + 200 / (10 * 2**0.5), 20.0 + 200 / (10 * 2**0.5) + 10
    assert [one.done_s for one in plan.members] == pytest.approx([*ends, ends[-1] + 11])
    assert {a.mode for a in plan.rounds[0].allocations} == {"fused"}
    assert plan.lower_bound_s == pytest.approx(700 / 20 + 100 / 10)


@pytest.mark.parametrize("planner", [LOCAL, PLANNERS["fluid"]])
def test_members_of_another_shape_train_together_when_those_of_the_first_have_ended(planner: Planner) -> None:
    pairs = [
        replace(member(name, [10], 100), fuses=shape, fused={1: 50.0, 2: 100.0})
        for name, shape in zip("abcd", ("one", "one", "two", "two"), strict=True)
    ]
    plan = predict(planner, pairs, 1)
    assert gpus_by_round(plan) == [{"a": 1, "b": 1}, {"c": 1, "d": 1}]
    assert [one.done_s for one in plan.members] == pytest.approx([10.0, 10.0, 21.0, 21.0])


def test_members_together_have_the_rate_of_the_type_of_their_gpu() -> None:
    by_type = {"slow": {1: 5.0}, "fast": {1: 10.0}}
    four = [
        replace(member(name, [10], 100), fuses="one", fused={1: 50.0, 2: 100.0}, rates_by_type=by_type)
        for name in "abcd"
    ]
    scenario = Scenario(Cluster.of_types({"slow": (1, 1), "fast": (1, 1)}), JobTiming(None, 0.0, 1.0, 5.0))
    plan = forecast(PLANNERS["fluid"], four, scenario, Options())
    assert sorted(one.done_s for one in plan.members) == pytest.approx([10.0, 10.0, 20.0, 20.0])
    assert {a.rate for a in plan.rounds[0].allocations} == {5.0, 10.0}


@settings(max_examples=30, deadline=None)
@given(
    works=st.lists(st.tuples(st.sampled_from(["", "x", "y"]), st.integers(1, 6)), min_size=1, max_size=9),
    gpus=st.integers(1, 3),
    planner=st.sampled_from(["fluid", "flotilla", "independent"]),
)
def test_each_member_trains_all_its_samples_whoever_trains_beside_it(works, gpus, planner) -> None:
    """Also where a start and one beside others fall together."""
    fused = {1: 50.0, 4: 100.0}
    members = [
        replace(member(f"m{number}", [10], 100 * epochs), fuses=shape, fused=fused)
        for number, (shape, epochs) in enumerate(works)
    ]
    plan = predict(PLANNERS[planner], members, gpus)
    assert plan.lower_bound_s <= plan.predicted_makespan_s * (1 + 1e-9)
    assert all(one.done_s is not None and one.done_s > 0 for one in plan.members)


def test_members_that_still_fit_the_job_train_first() -> None:
    # a's third epoch would end at 90 of 80 s, so from 60 s on b and c have its GPU.
    members = (
        Workload("a", {1: 10.0}, 900.0, 300),
        Workload("b", {1: 10.0}, 100.0, 100),
        Workload("c", {1: 10.0}, 300.0, 300),
    )
    plan = predict(LOCAL, members, 1, wall_s=80)
    assert gpus_by_round(plan) == [{"a": 1}, {"b": 1}, {"a": 1}, {"c": 1}]
    assert [r.start_s for r in plan.rounds] == [0, 61, 76, 107]


def test_a_limit_shorter_than_a_start_is_refused() -> None:
    short = Workload("d001", {1: 10.0}, 6000.0, 600)
    long = Workload("d017", {1: 10.0}, 246000.0, 24600, startup_s=2400.0, checkpoint_s=20.0)
    with pytest.raises(InfeasibleError) as caught:
        predict(LOCAL, (short, long), 1, wall_s=1800, grace_s=10)
    said = "round limit 0:30 is shorter than start-up, checkpoint and grace of d017 (41 min); raise --time"
    assert caught.value.message == said


def test_a_cluster_without_gpus_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="no GPU"):
        predict(FLOTILLA, (member("a", [10], 100),), 0)


def test_nothing_to_train_is_a_plan_without_rounds() -> None:
    plan = predict(FLOTILLA, (), 4)
    assert (plan.rounds, plan.members, plan.predicted_makespan_s, plan.ratio) == ((), (), 0, 1)


curves = st.lists(st.floats(1.0, 100.0), min_size=1, max_size=8).map(
    lambda values: dict(enumerate(values, start=1))
)
seconds = st.floats(0.0, 30.0)
samples = st.just(0.0) | st.floats(1e-3, 1e4)
ensembles = st.lists(
    st.tuples(curves, samples, st.none() | st.integers(1, 2000), seconds, seconds, seconds),
    min_size=1,
    max_size=8,
).map(lambda rows: tuple(Workload(f"m{i}", *row) for i, row in enumerate(rows)))
planners = st.sampled_from([FLOTILLA, INDEPENDENT, LOCAL, GLOBAL])
alphas = st.sampled_from([0.0, 0.5, 0.8, 1.0])


@settings(deadline=None)
@given(planners, ensembles, st.integers(1, 9), alphas)
def test_no_plan_beats_the_bound_and_plans_are_deterministic(
    planner: Planner, members: tuple[Workload, ...], gpus: int, alpha: float
) -> None:
    plan = predict(planner, members, gpus, options=Options(alpha=alpha))
    assert plan == predict(planner, members, gpus, options=Options(alpha=alpha))
    assert plan.predicted_makespan_s >= plan.lower_bound_s * (1 - 1e-9)
    assert plan.predicted_makespan_s == max(f.done_s for f in plan.members)
    assert [round_.index for round_ in plan.rounds] == list(range(len(plan.rounds)))
    assert max(r.start_s + r.predicted_s for r in plan.rounds) == pytest.approx(plan.predicted_makespan_s)


def on(workload: Workload, *gpus: int) -> Allocation:
    rate = workload.rates[len(gpus)]
    return Allocation(workload.name, len(gpus), DATA_PARALLEL, rate, (Placement("node-0", gpus),))


def request(*workloads: Workload, **values: object) -> Request:
    return Request(workloads, CLUSTER.nodes, 4, 0, Options(), **values)  # type: ignore[arg-type]


def test_reasons_give_gpus_of_members_and_whom_others_wait_for() -> None:
    reasons = reasons_for(SILENT, request(A, B, C), Decision((on(A, 0, 1), on(B, 2, 3))))
    assert reasons == {
        "a": "2 GPUs for 30% of the work: 18 samples/s, 90% of linear scaling",
        "b": "2 GPUs for 10% of the work: 20 samples/s, 100% of linear scaling;"
        " proportional above 1 GPU: one point was measured",
        "c": "waits: all GPUs are taken by a (2), b (2)",
    }


def test_idle_gpus_are_counted() -> None:
    reasons = reasons_for(SILENT, request(A, C), Decision((on(A, 0),)))
    assert reasons["c"] == "waits: 3 of 4 GPUs stay idle, the rest is taken by a (1)"


def test_without_a_decision_all_gpus_stay_idle() -> None:
    reasons = reasons_for(SILENT, request(A), Decision(()))
    assert reasons["a"] == "waits: all 4 GPUs stay idle"


def test_members_that_train_on_are_counted_named_or_not() -> None:
    two_free = Cluster.of(2, 4).nodes
    local = replace(request(B, C), nodes=two_free)
    assert reasons_for(SILENT, local, Decision((on(B, 0, 1),)))["c"] == (
        "waits: all GPUs are taken by b (2), those that train on (2)"
    )
    elastic = replace(local, held=(RunningMember(A, on(A, 2, 3), 0.0),))
    assert reasons_for(SILENT, elastic, Decision((on(B, 0, 1),)))["c"] == (
        "waits: all GPUs are taken by a (2), b (2)"
    )
    stopping = Decision((on(C, 2), on(B, 0, 1)), stop=("a",))
    assert reasons_for(SILENT, elastic, stopping)["a"] == (
        "stops: 1 of 4 GPUs stay idle, the rest is taken by b (2), c (1)"
    )


def test_reasons_of_the_planner_come_first() -> None:
    speaking = replace(SILENT, reasons=lambda _request, _decision: {"b": "is my favourite"})
    reasons = reasons_for(speaking, request(A, B), Decision((on(B, 0, 1), on(A, 2, 3))))
    assert reasons["b"] == "is my favourite; proportional above 1 GPU: one point was measured"
    assert reasons["a"].startswith("2 GPUs for 75% of the work")


def test_a_plan_asks_for_reasons_only_to_be_explained() -> None:
    asked = []

    def reasons(request: Request, decision: Decision) -> dict[str, str]:
        asked.append(request.round_index)
        return {a.member: f"round {request.round_index}" for a in decision.start}

    def decide(request: Request) -> Decision:
        return Decision((on(request.workloads[0], 0),))

    planner = Planner("speaking", "global", decide, reasons=reasons)
    plain = forecast(planner, (A, C), Scenario(CLUSTER), Options())
    assert (asked, [one.reasons for one in plain.rounds]) == ([], [{}, {}])
    told = forecast(planner, (A, C), Scenario(CLUSTER), Options(), explain=True)
    assert [one.reasons["c"] for one in told.rounds] == [
        "waits: 3 of 4 GPUs stay idle, the rest is taken by a (1)",
        "round 1",
    ]
    assert [replace(one, reasons={}) for one in told.rounds] == list(plain.rounds)
