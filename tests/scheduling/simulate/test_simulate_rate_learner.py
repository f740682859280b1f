"""Runs whose rates are known only after training."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.perf.sharing import GpuTerms
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Options
from hetctl.scheduling.simulate.rate_learner import RateLearner
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate


def ensemble_of(members: list[Workload], alike: bool = False) -> Ensemble:
    own = (
        Member(one.name, {"units": 0 if alike else number}, max_gpus=one.max_gpus)
        for number, one in enumerate(members)
    )
    return Ensemble("e", "pytorch", Functions("m:i", "m:m"), tuple(own), "/nowhere")


def run(planner: str, members: list[Workload], gpus: int, alike: bool = False) -> Simulation:
    learner = RateLearner(ensemble_of(members, alike), gpus)
    scenario = Scenario(Cluster.of(gpus, 4), rate_learner=learner)
    return simulate(planner_named(planner), [Arrival(one) for one in members], scenario, Options())


def scaling(name: str, power: float, work: float = 1e5, **values: float) -> Workload:
    rates = {gpus: 10 * gpus**power for gpus in range(1, 9)}
    return Workload(name, rates, work, restart_s=10.0, **values)  # type: ignore[arg-type]


def test_a_member_begins_on_one_gpu_and_grows_once_its_rate_is_known() -> None:
    result = run("fluid", [scaling("a", 0.9)], 8)
    first, *later = result.intervals
    assert (first.allocation.gpus, first.end_s) == (1, 3.0)
    assert (later[-1].allocation.gpus, later[-1].allocation.rate) == (8, pytest.approx(10 * 8**0.9))
    assert 1 <= result.ratio < 1.05


def test_members_sit_together_once_their_busy_shares_are_known() -> None:
    members = [Workload(f"m{n}", {1: 10.0}, 1e4, restart_s=10.0, busy=0.24) for n in range(4)]
    learner = RateLearner(ensemble_of(members), 1, terms=GpuTerms(4))
    scenario = Scenario(Cluster.of(1, 1), rate_learner=learner)
    result = simulate(
        planner_named("fluid"), [Arrival(one) for one in members], scenario, Options(max_per_gpu=4)
    )
    first, *_ = result.intervals
    beside = [one for one in result.intervals if one.start_s < first.start_s + 3.0]
    assert (first.allocation.alone, len(beside)) == (True, 1)
    assert result.ratio < 1.1


def test_gpus_that_turn_out_to_slow_a_member_down_are_given_back() -> None:
    slow = Workload(
        "a", {1: 10.0, 2: 8.0, 4: 5.0, 8: 3.0} | dict.fromkeys((3, 5, 6, 7), 5.0), 1e5, restart_s=10.0
    )
    result = run("fluid", [slow], 8)
    assert result.intervals[-1].allocation.gpus == 1
    assert result.ratio < 1.05


def test_more_gpus_are_tried_beyond_a_number_that_slows_a_member_down() -> None:
    """Alone it takes 1e4 s on one GPU; two are slower, but eight are not (one of Gavel's curves)."""
    rates = {1: 10.0, 2: 8.5, 3: 10.3, 4: 12.1, 5: 12.7, 6: 13.4, 7: 14.0, 8: 14.7}
    result = run("fluid", [Workload("a", rates, 1e5, restart_s=10.0)], 8)
    assert result.intervals[-1].allocation.gpus == 8
    assert result.ratio < 1.03
    short = run("fluid", [Workload("a", rates, 300.0, restart_s=10.0)], 8)
    assert len(short.intervals) <= 2


def test_members_that_are_alike_learn_from_one_another() -> None:
    """One has to try more GPUs; after a slow answer no other one does."""
    members = [scaling(f"m{number}", 0.05, 1e4 * (number + 1)) for number in range(4)]
    tried = {
        alike: sum(i.allocation.gpus > 1 for i in run("fluid", members, 16, alike).intervals)
        for alike in (True, False)
    }
    assert tried[True] <= tried[False]
    assert run("fluid", members, 16, alike=True).ratio < 1.1


def test_members_of_unknown_rate_begin_before_it_is_too_late() -> None:
    """The last in order is the longest; it starts before others end, which would take twice as long."""
    members = [scaling(f"m{number}", 0.0, 1e4) for number in range(8)]
    members.append(scaling("slow", 0.0, 1e4 * 8 / 4))
    result = run("fluid", members, 4)
    start_s = min(i.start_s for i in result.intervals if i.allocation.member == "slow")
    assert start_s < 100
    assert result.ratio < 1.1


@pytest.mark.parametrize("planner", ["fluid", "doubling", "static", "flotilla", "independent"])
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_all_work_is_done_and_no_run_beats_the_bound(planner: str, data: st.DataObject) -> None:
    powers = data.draw(st.lists(st.floats(-0.3, 1.0), min_size=1, max_size=6))
    members = [
        scaling(f"m{number}", power, data.draw(st.floats(10.0, 1e5))) for number, power in enumerate(powers)
    ]
    result = run(planner, members, data.draw(st.integers(1, 12)))
    done = {one.name: 0.0 for one in members}
    for interval in result.intervals:
        done[interval.allocation.member] += interval.samples
        assert interval.allocation.rate == members[int(interval.allocation.member[1:])].rates[interval.gpus]
    assert done == {one.name: pytest.approx(one.samples_left) for one in members}
    assert result.ratio >= 1 - 1e-9
