from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.workload import Workload
from hetctl.perf.bounds import fluid_bound
from hetctl.perf.epoch_timeline import (
    Allotments,
    EpochTimeline,
    allotment_bound,
    allotments_of,
    least_task_s,
    task_s,
)


def workload(left: float, epoch: int | None = 100) -> Workload:
    return Workload("a", {1: 10.0}, left, epoch, startup_s=7.0, evaluate_s=2.0, checkpoint_s=1.0)


def test_the_first_epoch_is_what_is_left_of_one() -> None:
    timeline = EpochTimeline(workload(230.0), 10.0)
    assert (timeline.count, timeline.size_of(0), timeline.size_of(1)) == (3, 30.0, 100.0)
    assert [timeline.end_of(epochs) for epochs in range(4)] == [0, 6, 19, 32]
    assert [timeline.left_after(epochs) for epochs in range(4)] == [230, 200, 100, 0]
    assert [timeline.epochs_within(s) for s in (5.9, 6.0, 18.9, 19.0, 1e9, float("inf"))] == [
        0,
        1,
        1,
        2,
        3,
        3,
    ]


def test_without_known_epochs_all_work_is_one_unevaluated_epoch() -> None:
    timeline = EpochTimeline(workload(230.0, epoch=None), 10.0)
    assert (timeline.count, timeline.end_of(1)) == (1, 24.0)


def test_nothing_left_has_no_epochs() -> None:
    timeline = EpochTimeline(workload(0.0), 10.0)
    assert (timeline.count, timeline.epochs_within(1e9), timeline.left_after(0)) == (0, 0, 0.0)


def test_the_least_step_holds_an_epoch_or_a_checkpoint() -> None:
    assert least_task_s(workload(230.0), 10.0) == 7 + 3 + 2 + 1
    assert least_task_s(workload(230.0, epoch=None), 10.0) == 7 + 1


@settings(deadline=None)
@given(st.floats(1e-6, 1e6), st.integers(1, 5000), st.floats(0.1, 1e4))
def test_rounding_adds_no_epoch_and_takes_none_away(left: float, epoch: int, rate: float) -> None:
    timeline = EpochTimeline(workload(left, epoch), rate)
    assert timeline.size_of(0) + (timeline.count - 1) * timeline.each == pytest.approx(left)
    assert 0 < timeline.size_of(0) <= epoch * (1 + 1e-6)
    for epochs in {1, timeline.count // 2, timeline.count} - {0}:
        assert timeline.epochs_within(timeline.end_of(epochs)) == epochs


times = st.dictionaries(st.integers(1, 12), st.floats(0.1, 1000.0), min_size=1).map(lambda d: {1: 900.0} | d)


def optimum(seconds: list[dict[int, int]], gpus: int) -> int:
    """The least makespan in whole seconds, by a model of its own."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    horizon = sum(min(options.values()) for options in seconds)
    last = model.new_int_var(0, horizon, "")
    intervals, demands = [], []
    for options in seconds:
        chosen = []
        for m, length in options.items():
            start, used = model.new_int_var(0, horizon, ""), model.new_bool_var("")
            intervals.append(model.new_optional_fixed_size_interval_var(start, length, used, ""))
            model.add(start + length <= last).only_enforce_if(used)
            demands.append(m)
            chosen.append(used)
        model.add_exactly_one(chosen)
    model.add_cumulative(intervals, demands, gpus)
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)


def small_instance(seed: int) -> tuple[list[dict[int, int]], int]:
    draw = random.Random(seed)
    gpus = draw.randint(1, 6)
    members = []
    for _ in range(draw.randint(1, 6)):
        alone, power = draw.randint(20, 200), draw.uniform(0.3, 1.2)
        members.append({m: max(round(alone / m**power), 1) for m in range(1, gpus + 1)})
    return members, gpus


@pytest.mark.parametrize("seed", range(25))
def test_no_bound_is_above_the_exact_optimum(seed: int) -> None:
    seconds, gpus = small_instance(seed)
    best = optimum(seconds, gpus)
    bound = allotment_bound([Allotments.of(member) for member in seconds], gpus)
    assert best / 3 < bound <= best
    members = [
        Workload(f"m{i}", {m: 1e6 / t for m, t in member.items()}, 1e6) for i, member in enumerate(seconds)
    ]
    own = [allotments_of(member, range(1, gpus + 1)) for member in members]
    assert allotment_bound(own, gpus) == pytest.approx(bound)
    assert fluid_bound(members, gpus) <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("members", "gpus", "bound_s"),
    [
        # Of members that cannot be split it is their area.
        ([{1: 10.0}] * 8, 4, 20.0),
        # It is at least the longest member at its best.
        ([{1: 10.0, 2: 7.0}, {1: 1.0}], 64, 7.0),
        # On one GPU each the area would fit 10 s; but within 10 s the long one takes 2 * 9 GPU-seconds.
        ([{1: 14.0, 2: 9.0}, {1: 6.0}], 2, 12.0),
        ([], 4, 0.0),
    ],
)
def test_the_bound_is_the_one_worked_out_by_hand(
    members: list[dict[int, float]], gpus: int, bound_s: float
) -> None:
    assert allotment_bound([Allotments.of(seconds) for seconds in members], gpus) == pytest.approx(bound_s)


@given(times)
def test_only_what_is_faster_is_worth_more_gpus(seconds: dict[int, float]) -> None:
    allotments = Allotments.of(seconds)
    assert list(allotments.gpus) == sorted(set(allotments.gpus))
    assert all(a > b for a, b in pairwise(allotments.seconds))
    assert allotments.seconds[-1] == min(seconds.values())


@given(times, st.floats(0.05, 2000.0))
def test_the_thriftiest_choice_within_a_limit(seconds: dict[int, float], limit_s: float) -> None:
    allotments = Allotments.of(seconds)
    at = allotments.within(limit_s)
    within = {m: t for m, t in seconds.items() if t <= limit_s}
    if not within:
        assert allotments.seconds[at] == min(seconds.values())
        return
    assert allotments.seconds[at] <= limit_s
    assert allotments.area(at) == pytest.approx(min(m * t for m, t in within.items()))


def test_a_superlinear_member_gets_what_takes_least() -> None:
    allotments = Allotments.of({1: 10.0, 2: 4.0, 4: 3.0})
    assert allotments.gpus[allotments.within(math.inf)] == 2


@given(st.floats(0.0, 1e5), st.none() | st.integers(1, 500), st.floats(0.0, 60.0), st.floats(0.1, 1e3))
def test_times_are_those_of_a_step(left: float, epoch: int | None, extra_s: float, rate: float) -> None:
    member = Workload("a", {1: rate, 2: 1.5 * rate}, left, epoch, extra_s, 2 * extra_s, 3 * extra_s)
    allotments = allotments_of(member, range(1, 3))
    assert allotments.seconds[0] == pytest.approx(task_s(member, rate))


def test_only_allowed_numbers_of_gpus_are_looked_at() -> None:
    member = Workload("a", {m: float(m) for m in range(1, 9)}, 100.0)
    assert allotments_of(member, {1, 4}).gpus == (1, 4)
