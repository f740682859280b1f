from __future__ import annotations

from dataclasses import replace

from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Decision, Held, Options, Planner, Request
from hetctl.scheduling.simulate.explain import reasons_for
from hetctl.scheduling.simulate.forecast import forecast
from hetctl.scheduling.simulate.scenario import Scenario

A, B, C = (
    Workload("a", {1: 10.0, 2: 18.0}, 300.0),
    Workload("b", {1: 10.0, 2: 20.0}, 100.0, notes=("proportional above 1 GPU: one point was measured",)),
    Workload("c", {1: 10.0}, 600.0),
)
CLUSTER = Cluster.of(4, 4)
SILENT = Planner("silent", "global", lambda _: Decision())


def on(workload: Workload, *gpus: int) -> Allocation:
    rate = workload.rates[len(gpus)]
    return Allocation(workload.name, len(gpus), DATA_PARALLEL, rate, (Placement("node-0", gpus),))


def request(*workloads: Workload, **values: object) -> Request:
    return Request(workloads, CLUSTER.nodes, 4, 0, Options(), **values)  # type: ignore[arg-type]


def test_what_each_got_and_who_waits_for_whom() -> None:
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


def test_members_that_train_on_are_counted_named_or_not() -> None:
    two_free = Cluster.of(2, 4).nodes
    local = replace(request(B, C), nodes=two_free)
    assert reasons_for(SILENT, local, Decision((on(B, 0, 1),)))["c"] == (
        "waits: all GPUs are taken by b (2), those that train on (2)"
    )
    elastic = replace(local, held=(Held(A, on(A, 2, 3), 0.0),))
    assert reasons_for(SILENT, elastic, Decision((on(B, 0, 1),)))["c"] == (
        "waits: all GPUs are taken by a (2), b (2)"
    )
    stopping = Decision((on(C, 2), on(B, 0, 1)), stop=("a",))
    assert reasons_for(SILENT, elastic, stopping)["a"] == (
        "stops: 1 of 4 GPUs stay idle, the rest is taken by b (2), c (1)"
    )


def test_a_planner_s_own_words_come_first() -> None:
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
