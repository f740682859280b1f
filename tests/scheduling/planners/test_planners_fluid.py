from __future__ import annotations

import math
import random
from cProfile import Profile
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.plan import Allocation
from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Decision, Options, Request, RunningMember
from hetctl.scheduling.planners.fluid import FLUID, expected_excess, explorers, rates_once_tried
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate


def ensemble(count: int, seed: int, restart_s: float = 10.0) -> list[Workload]:
    chance = random.Random(seed)
    members = []
    for index in range(count):
        single, power = 21 * (176 / 21) ** chance.random(), chance.uniform(0.8, 0.95)
        rates = {gpus: single * gpus**power for gpus in range(1, 33)}
        epochs = chance.randint(10, 40)
        members.append(Workload(f"d{index}", rates, 3000.0 * epochs, 3000, restart_s=restart_s))
    return members


def run(members: list[Workload], gpus: int, **options: object) -> Simulation:
    arrivals = [Arrival(member) for member in members]
    return simulate(FLUID, arrivals, Scenario(Cluster.of(gpus, 4)), Options(**options))  # type: ignore[arg-type]


def ask(*members: Workload, gpus: int) -> Request:
    return Request(members, Cluster.of(gpus, 4).nodes, gpus, 0, Options())


def test_a_rate_between_two_corners_is_a_mixture_of_both() -> None:
    """T is 10 s: a needs 15 samples/s, which are 5 s on 1 GPU and 5 s on 2; b needs half a GPU."""
    a, b = Workload("a", {1: 10.0, 2: 20.0}, 150.0), Workload("b", {1: 10.0}, 50.0)
    words = FLUID.reasons(request := ask(a, b, gpus=2), FLUID.decide(request))
    assert "15 samples/s to be done with all others in 10 s: between 1 and 2 GPUs, 50% of" in words["a"]
    assert "5 samples/s to be done with all others in 10 s: between 0 and 1 GPUs, 50% of" in words["b"]


def test_a_member_completes_its_share_before_the_next_begins() -> None:
    a, b = Workload("a", {1: 10.0, 2: 20.0}, 150.0), Workload("b", {1: 10.0}, 50.0)
    decision = FLUID.decide(ask(a, b, gpus=2))
    assert {given.member: given.gpus for given in decision.start} in ({"a": 2}, {"a": 1, "b": 1})
    assert run([a, b], 2).makespan_s == pytest.approx(10, rel=1e-3)


@pytest.mark.parametrize(("gpus", "most"), [(7, 1.01), (20, 1.02), (48, 1.05)])
def test_a_run_is_close_to_the_bound_and_restarts_are_few(gpus: int, most: float) -> None:
    members = ensemble(30, seed=1)
    result = run(members, gpus)
    assert 1 <= result.ratio < most
    assert result.restarts <= 2 * len(members) + gpus


def test_decisions_take_no_longer_if_more_members_wait() -> None:
    def calls(count: int) -> int:
        profile = Profile()
        profile.runcall(run, ensemble(count, seed=3), 8)
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(800) < 2.5 * calls(400)


@pytest.mark.parametrize("restart_s", [0.0, 10.0, 60.0])
def test_a_kept_queue_gives_the_decisions_of_a_new_one(restart_s: float) -> None:
    def decide(request: Request) -> Decision:
        decision = FLUID.decide(request)
        anew = FLUID.decide(replace(request, workloads=tuple(request.workloads)))
        assert (decision.start, decision.stop) == (anew.start, anew.stop)
        assert decision.replan_at_s == anew.replan_at_s
        return decision

    members = [replace(m, startup_s=index % 3 * 20.0) for index, m in enumerate(ensemble(40, 4, restart_s))]
    arrivals = [Arrival(member, 60.0 * index) for index, member in enumerate(members)]
    planner = replace(FLUID, decide=decide)
    assert simulate(planner, arrivals, Scenario(Cluster.of(12, 4)), Options()).restarts > 0


def test_restarts_that_cost_more_are_fewer() -> None:
    few = run(ensemble(30, 2, restart_s=200.0), 48)
    many = run(ensemble(30, 2, restart_s=1.0), 48)
    assert few.restarts < many.restarts


def test_a_single_long_member_gets_its_best_number_of_gpus() -> None:
    long, short = Workload("a", {1: 10.0, 2: 18.0, 3: 17.0}, 1800.0), Workload("b", {1: 10.0}, 100.0)
    result = run([long, short], 4)
    assert result.makespan_s == pytest.approx(100)
    assert result.restarts == 0


def test_reasons_give_the_needed_rate_and_why_one_waits() -> None:
    a, b = Workload("a", {1: 10.0}, 200.0), Workload("b", {1: 10.0}, 100.0)
    asked = ask(a, b, gpus=1)
    words = FLUID.reasons(asked, FLUID.decide(asked))
    assert words["a"] == (
        "needs 7 samples/s to be done with all others in 30 s: between 0 and 1 GPUs, 67% of the time on 1;"
        " has that share now"
    )
    assert words["b"].endswith("33% of the time on 1; can wait for it")


def test_the_expected_excess_is_the_mean_over_draws() -> None:
    draw = random.Random(1)
    drawn = [max(draw.lognormvariate(math.log(90.0), 0.4) - 100.0, 0.0) for _ in range(40_000)]
    assert expected_excess(90.0, 0.4, 100.0) == pytest.approx(sum(drawn) / len(drawn), rel=0.03)


@given(
    rates=st.lists(st.floats(1.0, 1e3), min_size=2, max_size=8),
    spread=st.floats(0.01, 1.0),
    work=st.floats(0.0, 1e7),
    restart_s=st.floats(0.0, 100.0),
)
def test_a_trial_can_only_gain_and_is_made_only_if_that_is_more_than_its_restarts(
    rates: list[float], spread: float, work: float, restart_s: float
) -> None:
    unknown = dict.fromkeys(range(2, len(rates) + 1), spread)
    member = Workload("a", dict(enumerate(rates, start=1)), work, restart_s=restart_s, spread=unknown)
    tried = rates_once_tried(member)
    assert tried[1] == rates[0]
    for gpus in unknown:
        if tried[gpus] != member.rates[gpus]:
            before = max(rates[0], member.rates[gpus])
            assert tried[gpus] > before
            assert work / before - work / tried[gpus] > restart_s


def test_a_trial_is_not_worth_its_restarts_near_the_end() -> None:
    member = Workload("a", {1: 100.0, 8: 90.0}, 1e5, restart_s=5.0, spread={8: 0.4})
    assert rates_once_tried(member)[8] > 100
    assert rates_once_tried(member.with_left(1e3)) is member.rates


def test_one_member_of_a_family_tries_numbers_of_gpus_until_the_rate_there_is_known() -> None:
    def holds(name: str, left: float, gpus: int = 1, family: str = "f") -> RunningMember:
        member = Workload(name, {1: 10.0, 2: 9.0}, left, spread={2: 0.3}, family=family)
        return RunningMember(member, Allocation(name, gpus, "data-parallel", member.rates[gpus], ()), 0.0)

    assert set(explorers([holds("a", 10.0), holds("b", 20.0), holds("c", 5.0, family="")])) == {"b", "c"}
    assert set(explorers([holds("a", 10.0, gpus=2), holds("b", 20.0)])) == {"a"}
    known = holds("a", 10.0)
    assert not explorers([replace(known, workload=replace(known.workload, spread={}))])
