"""Options of planners, and the queue of the members that wait."""

from __future__ import annotations

from typing import Any

import pytest

from hetctl.model.errors import BadInputError
from hetctl.model.plan import Allocation
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners import PLANNERS, planner_named
from hetctl.scheduling.planners.base import (
    Decision,
    Options,
    Request,
    WaitingQueue,
    options_from,
    plan_fitting,
)


def test_missing_options_take_their_defaults() -> None:
    assert options_from({}) == Options()
    assert options_from({"delta": 20, "seed": 3}) == Options(delta=20, seed=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("delta", 0),
        ("delta", "20"),
        ("relative_delta", None),
        ("relative_delta", -0.1),
        ("alpha", 1.01),
        ("alpha", True),
        ("alpha", float("nan")),
        ("max_permutations", 0),
        ("max_permutations", 10.0),
        ("seed", 1.5),
    ],
)
def test_a_bad_option_is_refused_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(BadInputError, match=f"planner option {name} is .* but must be"):
        options_from({name: value})


def test_an_unknown_option_gets_the_nearest_name() -> None:
    with pytest.raises(BadInputError, match="'alhpa'") as caught:
        options_from({"alhpa": 0.5})
    assert caught.value.hint == "did you mean alpha?"


def test_planners_are_found_by_name() -> None:
    assert all(planner_named(name).name == name for name in PLANNERS)
    assert planner_named("flotilla").paradigm == "global"
    with pytest.raises(BadInputError, match="'flotila'") as caught:
        planner_named("flotila")
    assert caught.value.hint == "did you mean flotilla?"


def request_for(*names: str) -> Request:
    workloads = tuple(Workload(name, {1: 10.0, 2: 18.0}, 100.0) for name in names)
    return Request(workloads, Cluster.of(2, 2).nodes, 2, 0, Options())


def test_members_that_do_not_fit_leave_their_gpus_to_others() -> None:
    asked = request_for("a", "b", "c", "d")
    decision, left_out = plan_fitting(
        PLANNERS["independent"], asked, lambda given: given.member in ("b", "d")
    )
    assert {allocation.member for allocation in decision.start} <= {"b", "d"}
    assert decision.start
    assert set(left_out) <= {"a", "c"}


def test_a_member_that_needs_all_gpus_gets_them() -> None:
    def fits(given: Allocation) -> bool:
        return given.gpus == 2

    decision, left_out = plan_fitting(PLANNERS["flotilla"], request_for("a", "b"), fits)
    assert [allocation.gpus for allocation in decision.start] == [2]
    assert len(left_out) == 1


def test_all_members_are_left_out_if_none_fits() -> None:
    assert plan_fitting(PLANNERS["flotilla"], request_for("a", "b"), lambda _: False) == (
        Decision(),
        ("a", "b"),
    )


def member(name: str, samples_left: float, rate: float = 10.0) -> Workload:
    return Workload(name, {1: rate}, samples_left)


def test_a_returning_member_precedes_those_that_arrived_later() -> None:
    queue = WaitingQueue(lambda _: 0, [member(name, 100) for name in "abc"])
    queue.drop("a")
    assert [c.name for c in queue] == ["b", "c"]
    queue.add(member("a", 50))
    assert [(c.name, c.samples_left) for c in queue] == [("a", 50), ("b", 100), ("c", 100)]
    assert [c.name for c in queue.without({"b"})] == ["a", "c"]


def test_a_member_wider_than_the_backlog_joins_the_queue() -> None:
    queue = WaitingQueue(lambda _: 0, [member("a", 100)])
    assert queue.backlog(2).least_s == 10
    queue.add(Workload("wide", {4: 40.0}, 400.0))
    assert queue.largest_min_gpus == 4
    queue.drop("wide")
    assert queue.backlog(2).least_s == 10
