from __future__ import annotations

import random

from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Options, Request, RunningMember
from hetctl.scheduling.planners.fluid import FLUID
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

OPTIONS = Options(objective="mean-jct")


def member(name: str, samples: float) -> Workload:
    return Workload(name, {1: 10.0, 2: 17.0, 3: 17.0, 4: 28.0}, samples, restart_s=1.0)


def counts(gpus: int, *members: Workload) -> dict[str, int]:
    asked = Request(members, Cluster.of(gpus, 4).nodes, gpus, 0, OPTIONS)
    return {given.member: given.gpus for given in FLUID.decide(asked).start}


def test_when_gpus_are_few_the_shortest_train() -> None:
    members = (member("a", 3000), member("b", 1000), member("c", 2000))
    assert counts(2, *members) == {"b": 1, "c": 1}


def test_gpus_that_are_left_go_to_the_shorter_of_two_alike() -> None:
    assert counts(3, member("a", 3000), member("b", 1000)) == {"a": 1, "b": 2}


def test_a_member_in_training_is_stopped_only_if_that_pays() -> None:
    running = FLUID.decide(Request((member("a", 1000),), Cluster.of(1, 4).nodes, 1, 0, OPTIONS)).start

    def stopped_by(samples: float) -> tuple[str, ...]:
        held = (RunningMember(member("a", 1000), running[0], 0.0),)
        cluster = Cluster.of(1, 4).nodes
        return FLUID.decide(Request((member("b", samples),), (), 1, 1, OPTIONS, held, cluster)).stop

    assert stopped_by(900) == ("a",)
    assert stopped_by(999) == ()


def test_under_contention_the_mean_jct_is_below_that_of_doubling() -> None:
    chance = random.Random(4)
    at_s, arrivals = 0.0, []
    for number in range(60):
        at_s += chance.expovariate(1 / 40)
        arrivals.append(Arrival(member(f"m{number}", chance.lognormvariate(8, 1)), at_s))
    scenario = Scenario(Cluster.of(16, 4))
    ours = simulate(FLUID, arrivals, scenario, OPTIONS)
    theirs = simulate(planner_named("doubling"), arrivals, scenario, OPTIONS)
    assert ours.lower_bound_s <= ours.mean_jct_s < theirs.mean_jct_s


def test_reasons_name_the_waiting_members() -> None:
    members = (member("a", 3000), member("b", 1000))
    asked = Request(members, Cluster.of(1, 4).nodes, 1, 0, OPTIONS)
    words = FLUID.reasons(asked, FLUID.decide(asked))
    assert words["a"] == "waits: 1 members have less work left than its 300 GPU-seconds"
    assert words["b"] == "1 GPU for 100 GPU-seconds of work left: it can use no more"
