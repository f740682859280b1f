from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Options
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate
from hetctl.scheduling.simulate.work_estimator import FIRST_PRIOR, RULE, LossCurve, WorkEstimator, equation_1

EPOCH = 1000


def members(*epochs: float, per_epoch: int | None = EPOCH) -> list[Workload]:
    rates = {1: 100.0, 2: 180.0}
    return [Workload(f"m{i}", rates, e * EPOCH, per_epoch) for i, e in enumerate(epochs)]


def after(workloads: list[Workload], epochs: float) -> list[Workload]:
    return [replace(c, samples_left=c.samples_left - epochs * EPOCH) for c in workloads]


def test_all_members_have_the_first_guess_at_the_start() -> None:
    found = WorkEstimator(members(10, 20, 40), 0)(members(10, 20, 40))
    assert {workload.samples_left for workload in found} == {FIRST_PRIOR.epochs * EPOCH}


def test_losses_tell_long_members_from_short_ones() -> None:
    true = members(15, 25, 40, 20, 30)
    found = WorkEstimator(true, 3)(after(true, 12))
    predicted = [workload.samples_left / EPOCH + 12 for workload in found]
    assert predicted == pytest.approx([15, 25, 40, 20, 30], rel=0.3)


def test_an_unstarted_member_is_predicted_like_the_others() -> None:
    true = members(40, 41, 39, 42, 40, 38, 10)
    estimator = WorkEstimator(true, 1)
    begun = [*after(true[:-1], 25), true[-1]]
    assert estimator(begun)[-1].samples_left / EPOCH == pytest.approx(40, rel=0.15)


@pytest.mark.parametrize("others", [12, 38])
def test_members_out_of_sight_do_not_betray_their_work(others: int) -> None:
    true = members(20, *[others] * 6)
    (found,) = WorkEstimator(true, 0)(true[:1])
    assert found.samples_left == FIRST_PRIOR.epochs * EPOCH


def test_losses_of_absent_members_still_count() -> None:
    true = members(30, *[40] * 6)
    estimator = WorkEstimator(true, 1)
    estimator(after(true[1:], 25))
    assert estimator(true[:1])[0].samples_left / EPOCH == pytest.approx(40, rel=0.15)


def test_work_left_stays_above_0_past_the_prediction() -> None:
    true = members(12)
    estimator = WorkEstimator(true, 0)
    for tenth in range(120):
        assert estimator(after(true, tenth / 10))[0].samples_left >= EPOCH / 4


def test_the_same_seed_shows_the_same() -> None:
    true = members(15, 25)
    assert WorkEstimator(true, 7)(after(true, 9)) == WorkEstimator(true, 7)(after(true, 9))
    assert WorkEstimator(true, 7)(after(true, 9)) != WorkEstimator(true, 8)(after(true, 9))


@pytest.mark.parametrize("epochs", [2.0, 7.5, 30.0, 99.0, 2000.0])
def test_the_work_is_done_when_the_rule_holds(epochs: float) -> None:
    curve = equation_1(epochs, random.Random(1))
    gain = curve.loss(epochs - 1) - curve.loss(epochs)
    assert gain == pytest.approx(RULE.min_delta)


def test_another_curve_leads_to_another_prediction() -> None:
    true, flat = members(30), LossCurve(lambda epoch: 1 + 2.0 ** (5 - epoch))
    usual, other = (
        WorkEstimator(true, 0, curve_family) for curve_family in (None, lambda _epochs, _draw: flat)
    )
    assert other(after(true, 20)) != usual(after(true, 20))


def test_members_without_epochs_are_given_some() -> None:
    true = members(5, 6, per_epoch=None)
    found = WorkEstimator(true, 0)(true)
    assert all(workload.samples_left > 0 for workload in found)


def test_a_run_ends_with_the_true_work_and_reports_the_errors() -> None:
    true = members(*range(10, 30))
    estimator = WorkEstimator(true, 2)
    scenario = Scenario(Cluster.of(8, 4), work_estimator=estimator)
    result = simulate(planner_named("fluid"), [Arrival(c) for c in true], scenario, Options())
    trained = {c.name: 0.0 for c in true}
    for interval in result.intervals:
        trained[interval.member] += interval.samples
    assert trained == pytest.approx({c.name: c.samples_left for c in true})
    errors = estimator.errors()
    assert set(errors) == {0.1, 0.25, 0.5, 0.75}
    assert errors[0.75] < errors[0.1]
    assert result.work == "predicted"
