"""Small runs, computed by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from hetctl.model.errors import InfeasibleError
from hetctl.model.plan import Allocation, Placement
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Decision, Options, Planner, Request
from hetctl.scheduling.round_scheduler import POLL_S
from hetctl.scheduling.simulate.engine import Engine
from hetctl.scheduling.simulate.scenario import Arrival, Failures, JobTiming, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

Row = tuple[str, int, float, float, float]
"""Member, GPUs, start, end, samples."""


def member(name: str, samples: float, **values: float) -> Workload:
    rates = {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0}
    return Workload(name, rates, samples, **values)  # type: ignore[arg-type]


def given(workload: Workload, *gpus: int, node: str = "node-0") -> Allocation:
    count = len(gpus)
    return Allocation(workload.name, count, "data-parallel", workload.rates[count], (Placement(node, gpus),))


def one_each(request: Request) -> Decision:
    slots = [(node.name, gpu) for node in request.nodes for gpu in node.gpus]
    pairs = zip(request.workloads, slots, strict=False)
    return Decision(tuple(given(c, gpu, node=node) for c, (node, gpu) in pairs))


LOCAL = Planner("local", "local", one_each)
GROUP = Planner("group", "global", one_each, trains_as_group=True, alpha=0.0)


def elastic(decide: Callable[[Request], Decision]) -> Planner:
    return Planner("elastic", "elastic", decide)


def run(
    planner: Planner, arrivals: Sequence[Arrival], gpus: int = 4, per_node: int = 4, **scenario: object
) -> list[Row]:
    engine = Engine(planner, arrivals, Scenario(Cluster.of(gpus, per_node), **scenario), Options()).run()  # type: ignore[arg-type]
    return [
        (s.workload.name, s.allocation.gpus, s.start_s, s.end_s, pytest.approx(s.samples))
        for s in engine.tasks
    ]


def test_members_start_on_arrival_or_wait_for_free_gpus() -> None:
    arrivals = [Arrival(member("b", 50), 5.0), Arrival(member("a", 100)), Arrival(member("c", 10), 30.0)]
    assert run(LOCAL, arrivals, gpus=1) == [
        ("a", 1, 0.0, 10.0, 100),
        ("b", 1, 10.0, 15.0, 50),
        ("c", 1, 30.0, 31.0, 10),
    ]


def test_a_resize_costs_a_checkpoint_and_a_restart() -> None:
    """On 1 GPU until b comes at 20, then a has 3: stopped with 200 done, 2 s checkpoint, 5 s restart."""
    a, b = member("a", 500, startup_s=0.0, restart_s=5.0, checkpoint_s=2.0), member("b", 100)

    def decide(request: Request) -> Decision:
        waiting = {c.name: c for c in request.workloads}
        if "b" in waiting:
            return Decision((given(request.held[0].workload, 0, 1, 2), given(waiting["b"], 3)))
        return Decision(tuple(given(c, 0) for c in request.workloads))

    assert run(elastic(decide), [Arrival(a), Arrival(b, 20.0)]) == [
        ("a", 1, 0.0, 22.0, 200),
        ("b", 1, 20.0, 30.0, 100),
        ("a", 3, 22.0, 22 + 5 + 10 + 2, 300),
    ]


def test_an_elastic_planner_sees_the_progress_of_held_members() -> None:
    seen: list[tuple[float, float, float]] = []

    def decide(request: Request) -> Decision:
        seen.extend((request.now_s, h.workload.samples_left, h.workload.startup_s) for h in request.held)
        return one_each(request)

    run(
        elastic(decide),
        [Arrival(member("a", 100, startup_s=3.0, restart_s=4.0)), Arrival(member("b", 1), 8.0)],
    )
    assert (8.0, 50.0, 4.0) in seen


def test_a_stopped_member_waits_and_continues() -> None:
    """The planner requests a tick after 4 s, stops a then, and lets b have the GPU."""

    def decide(request: Request) -> Decision:
        waiting = {c.name: c for c in request.workloads}
        if request.now_s == 0:
            return Decision((given(waiting["a"], 0),), replan_at_s=4.0, planner_state="stop")
        if request.held and request.planner_state == "stop":
            return Decision((given(waiting["b"], 0),), stop=("a",))
        return one_each(request) if not request.held else Decision()

    rows = run(elastic(decide), [Arrival(member("a", 100)), Arrival(member("b", 50))], gpus=1)
    assert rows == [("a", 1, 0.0, 4.0, 40), ("b", 1, 4.0, 9.0, 50), ("a", 1, 9.0, 15.0, 60)]


def test_a_planner_cannot_ask_for_the_past() -> None:
    asked: list[float] = []

    def decide(request: Request) -> Decision:
        asked.append(request.now_s)
        replan_at_s = request.now_s if len(asked) < 3 else None
        return Decision(one_each(request).start, replan_at_s=replan_at_s)

    assert run(elastic(decide), [Arrival(member("a", 100))]) == [("a", 1, 0.0, 10.0, 100)]
    assert asked[:3] == pytest.approx([0.0, POLL_S, 2 * POLL_S])


def test_in_lockstep_the_slowest_sets_the_rate_until_it_is_done() -> None:
    """Slow has 5 samples/s and ends at 20; fast has done 100 of 300 by then and does 200 more at 10."""
    slow = Workload("slow", {1: 5.0}, 100)
    arrivals = [Arrival(slow), Arrival(member("fast", 300))]
    assert run(GROUP, arrivals, lockstep=True) == [
        ("slow", 1, 0.0, 20.0, 100),
        ("fast", 1, 0.0, 40.0, 300),
    ]
    # Only members of a group that shares its data wait for one another.
    assert run(GROUP, arrivals)[1] == run(LOCAL, arrivals, lockstep=True)[1] == ("fast", 1, 0.0, 30.0, 300)


def test_the_pace_changes_twice_in_mid_epoch() -> None:
    """At 2/s until 50, at 5/s until 60, then at 10/s; epochs of 100 samples end with 1 s checkpoints.

    fast: 100 done at 50, checkpoint until 51, 45 done by 60, 55 more by 65.5, checkpoint until 66.5.
    """
    slowest, slow = Workload("slowest", {1: 2.0}, 100), Workload("slow", {1: 5.0}, 150)
    fast = member("fast", 200, samples_per_epoch=100, checkpoint_s=1.0)
    rows = run(GROUP, [Arrival(slowest), Arrival(slow), Arrival(fast)], lockstep=True)
    assert rows == [
        ("slowest", 1, 0.0, 50.0, 100),
        ("slow", 1, 0.0, 60.0, 150),
        ("fast", 1, 0.0, 66.5, 200),
    ]


class _Drawn(random.Random):
    """Failures at times that are known: the first draw is the first node's, and so on."""

    times: list[float] = []  # noqa: RUF012

    def expovariate(self, lambd: float = 1.0) -> float:
        return self.times.pop(0) if self.times else 1e9 * lambd


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Failures]:
    def at(*times: float, **values: float) -> Failures:
        _Drawn.times = list(times)
        return Failures(1.0, **values)  # type: ignore[arg-type]

    monkeypatch.setattr("hetctl.scheduling.simulate.engine.random.Random", _Drawn)
    return at


def test_a_failure_costs_what_came_after_the_last_epoch(failing: Callable[..., Failures]) -> None:
    """Two epochs of 100 are done when the node fails at 25; it is back at 35, and a restart takes 4 s."""
    a = member("a", 400, samples_per_epoch=100, restart_s=4.0)
    assert run(LOCAL, [Arrival(a)], gpus=1, failures=failing(25.0, repair_s=10.0)) == [
        ("a", 1, 0.0, 25.0, 200),
        ("a", 1, 35.0, 35 + 4 + 20.0, 200),
    ]


def test_without_epochs_a_failure_loses_work_since_a_checkpoint(
    failing: Callable[..., Failures],
) -> None:
    failures = failing(25.0, repair_s=10.0, checkpoint_every_s=8.0)
    assert run(LOCAL, [Arrival(member("a", 400, startup_s=2.0))], gpus=1, failures=failures) == [
        ("a", 1, 0.0, 25.0, 160),
        ("a", 1, 35.0, 35 + 2 + 24.0, 240),
    ]


def test_a_failure_ends_only_members_of_its_node(failing: Callable[..., Failures]) -> None:
    """At 3 s node-0 fails; b trains on, and then all go by turns on the node that is left."""
    arrivals = [Arrival(member("a", 100)), Arrival(member("b", 50)), Arrival(member("c", 100))]
    rows = run(LOCAL, arrivals, gpus=2, per_node=1, failures=failing(3.0, repair_s=100.0))
    assert rows == [
        ("a", 1, 0.0, 3.0, 0),
        ("b", 1, 0.0, 5.0, 50),
        ("a", 1, 5.0, 15.0, 100),
        ("c", 1, 15.0, 25.0, 100),
    ]


def test_a_job_ends_with_its_last_node_and_the_next_has_repaired(
    failing: Callable[..., Failures],
) -> None:
    """Nodes fail at 3 s and 8 s, and are back a second later; the next job is there at 12 s."""
    arrivals = [Arrival(member(name, 100)) for name in "ab"]
    failures = failing(3.0, 8.0, repair_s=1.0)
    timing = JobTiming(job_overhead_s=4.0)
    assert run(LOCAL, arrivals, gpus=2, per_node=1, failures=failures, timing=timing) == [
        ("a", 1, 0.0, 3.0, 0),
        ("b", 1, 0.0, 8.0, 0),
        ("a", 1, 12.0, 22.0, 100),
        ("b", 1, 12.0, 22.0, 100),
    ]


def test_a_node_that_comes_back_is_there_for_the_next_job_only(failing: Callable[..., Failures]) -> None:
    """node-0 is back at 4 s, and in no job before that which begins when node-1 fails at 8 s."""
    arrivals = [Arrival(member(name, 100)) for name in "ab"]
    failures = failing(3.0, 8.0, repair_s=1.0)
    assert run(LOCAL, arrivals, gpus=2, per_node=1, failures=failures) == [
        ("a", 1, 0.0, 3.0, 0),
        ("b", 1, 0.0, 8.0, 0),
        ("a", 1, 8.0, 18.0, 100),
        ("b", 1, 18.0, 28.0, 100),
    ]


def test_without_any_node_the_next_job_waits_for_one(failing: Callable[..., Failures]) -> None:
    failures = failing(3.0, repair_s=10.0)
    rows = run(LOCAL, [Arrival(member("a", 100))], gpus=1, failures=failures, timing=JobTiming(wall_s=50.0))
    assert rows == [("a", 1, 0.0, 3.0, 0), ("a", 1, 13.0, 23.0, 100)]


def test_the_next_job_gets_the_planner_state_of_the_last_round() -> None:
    """Asked at 0 s and, in vain, when the epoch of a ends at 10 s; then the next job begins."""
    remembered: list[object] = []

    def decide(request: Request) -> Decision:
        remembered.append(request.planner_state)
        return Decision(one_each(request).start, planner_state=len(remembered))

    rows = run(
        elastic(decide), [Arrival(member("a", 200, samples_per_epoch=100))], timing=JobTiming(wall_s=15.0)
    )
    assert [start_s for _, _, start_s, _, _ in rows] == [0.0, 10.0]
    assert remembered == [None, 1, 1, 1]


def test_a_resize_by_the_planner_does_not_trigger_another_call() -> None:
    """a is resized to two GPUs by a command at 4 s, and has them at 6 s."""
    asked: list[float] = []

    def decide(request: Request) -> Decision:
        asked.append(request.now_s)
        if request.held and request.now_s == 4.0:
            return Decision((given(request.held[0].workload, 0, 1),))
        return Decision(one_each(request).start, replan_at_s=4.0 if request.now_s < 4 else None)

    run(elastic(decide), [Arrival(member("a", 100, checkpoint_s=2.0))])
    assert asked == pytest.approx([0.0, 4.0])


def test_an_epoch_that_is_being_evaluated_is_lost(failing: Callable[..., Failures]) -> None:
    a = member("a", 200, samples_per_epoch=100, evaluate_s=4.0, checkpoint_s=1.0)
    assert run(LOCAL, [Arrival(a)], gpus=1, failures=failing(14.5, repair_s=1.0))[0] == ("a", 1, 0.0, 14.5, 0)
    assert run(LOCAL, [Arrival(a)], gpus=1, failures=failing(15.5, repair_s=1.0))[0] == (
        ("a", 1, 0.0, 15.5, 100)
    )


def test_a_group_in_evaluation_is_stopped_only_after_it() -> None:
    """At 50 the first two are done, and fast, which has just changed its pace, is in its evaluation."""
    alike = [Arrival(Workload(name, {1: 2.0}, 100)) for name in ("a", "b")]
    fast = member("fast", 200, samples_per_epoch=100, evaluate_s=3.0)
    planner = Planner("group", "global", one_each, trains_as_group=True, alpha=0.5)
    rows = run(planner, [*alike, Arrival(fast), Arrival(member("later", 10))], gpus=3, lockstep=True)
    assert rows[2:] == [
        ("fast", 1, 0.0, 53.0, 100),
        ("fast", 1, 53.0, 66.0, 100),
        ("later", 1, 53.0, 54.0, 10),
    ]


def test_a_leaving_member_whose_node_fails_is_not_lost(failing: Callable[..., Failures]) -> None:
    """Told at 4 to move, its checkpoint would be over at 6; the node fails at 5, and it begins anew."""
    a = member("a", 100, checkpoint_s=2.0)

    def decide(request: Request) -> Decision:
        if request.held and request.now_s == 4.0:
            return Decision((given(request.held[0].workload, 0, node="node-1"),))
        replan_at_s = 4.0 if request.now_s < 4 else None
        return Decision(one_each(request).start if not request.held else (), replan_at_s=replan_at_s)

    failures = failing(5.0, repair_s=100.0)
    assert run(elastic(decide), [Arrival(a)], gpus=2, per_node=1, failures=failures) == [
        ("a", 1, 0.0, 5.0, 0),
        ("a", 1, 5.0, 17.0, 100),
    ]


def test_a_job_starts_no_epoch_that_would_pass_its_limit() -> None:
    """Epochs of 10 s, a limit of 26 s with 1 s of grace: two in the first job; 3 s later the third."""
    a = member("a", 300, samples_per_epoch=100)
    timing = JobTiming(wall_s=26.0, grace_s=1.0, round_overhead_s=1.0, job_overhead_s=3.0)
    assert run(LOCAL, [Arrival(a)], timing=timing) == [
        ("a", 1, 0.0, 20.0, 200),
        ("a", 1, 23.0, 33.0, 100),
    ]


def test_a_limit_too_short_for_any_member_is_refused() -> None:
    a = member("a", 300, samples_per_epoch=300, startup_s=18.0, checkpoint_s=4.0)
    with pytest.raises(InfeasibleError, match=r"limit 0:00:20 is shorter than .* of a \(22 s\)"):
        run(LOCAL, [Arrival(a)], timing=JobTiming(wall_s=20.0))


def one_each_or_all(request: Request) -> Decision:
    """Give each member a GPU, or all free ones to a member that waits alone."""
    if len(request.workloads) > 1:
        return one_each(request)
    gpus = [gpu for node in request.nodes for gpu in node.gpus]
    return Decision(tuple(given(c, *gpus) for c in request.workloads))


@pytest.mark.parametrize("samples", [150, 199])
def test_a_deferred_member_is_planned_again_when_gpus_are_freed(samples: float) -> None:
    """c needs 30 s of a job of 40 s on one GPU: too late when a is done; at 20 s it has both, for 15 s."""
    arrivals = [
        Arrival(member("a", samples)),
        Arrival(member("b", 200)),
        Arrival(member("c", 300, samples_per_epoch=300)),
    ]
    rows = run(elastic(one_each_or_all), arrivals, gpus=2, timing=JobTiming(wall_s=40.0))
    assert rows[2:] == [("c", 2, 20.0, 35.0, 300)]


def test_a_member_without_room_does_not_restart_on_as_many_gpus() -> None:
    """At the pace of slow, fast has no room for an epoch of 10 s at 20 s of 29; alone it would take 4 s."""
    slow, fast = Workload("slow", {1: 4.0}, 100, 100), Workload("fast", {1: 10.0}, 120, 40)
    local = Planner("local", "local", one_each, trains_as_group=True, alpha=0.0)
    rows = run(local, [Arrival(slow), Arrival(fast)], gpus=2, lockstep=True, timing=JobTiming(wall_s=29.0))
    assert rows == [("slow", 1, 0.0, 25.0, 100), ("fast", 1, 0.0, 20.0, 80), ("fast", 1, 25.0, 29.0, 40)]


def test_an_epoch_that_fits_no_job_is_trained_in_parts() -> None:
    a = member("a", 600, samples_per_epoch=300, startup_s=2.0, checkpoint_s=1.0)
    assert run(LOCAL, [Arrival(a)], timing=JobTiming(wall_s=20.0)) == [
        ("a", 1, 0.0, 20.0, 170),  # 2 s of start-up, 17 s of training, 1 s for the checkpoint
        ("a", 1, 20.0, 40.0, 160),  # the rest of the epoch until 36 s, and a part of the next
        ("a", 1, 40.0, 60.0, 170),
        ("a", 1, 60.0, 73.0, 100),
    ]


def test_a_job_does_not_begin_before_there_is_something_to_do() -> None:
    a = member("a", 200, samples_per_epoch=100)
    assert run(LOCAL, [Arrival(a, 15.0)], timing=JobTiming(wall_s=25.0)) == [("a", 1, 15.0, 35.0, 200)]


def test_a_simulation_reports_times_bounds_and_busy_share() -> None:
    arrivals = [Arrival(member("a", 100, restart_s=1.0)), Arrival(member("b", 50), 5.0)]
    result = simulate(LOCAL, arrivals, Scenario(Cluster.of(1, 1)), Options())
    assert (result.makespan_s, result.mean_jct_s, result.restarts) == (15.0, 10.0, 0)
    assert (result.lower_bound_s, result.ratio, result.gpu_busy_fraction) == pytest.approx((15.0, 1.0, 1.0))


def test_members_that_share_a_gpu_use_its_seconds_together() -> None:
    """What a search's budget counts: one GPU from the start, whoever sits on it."""
    used = []

    def none_follows(name: str, now_s: float, gpu_s: float) -> tuple[()]:
        used.append((name, now_s, gpu_s))
        return ()

    arrivals = [
        Arrival(member(name, samples, busy=0.5), 0.0) for name, samples in (("a", 100.0), ("b", 200.0))
    ]
    scenario = Scenario(Cluster.of(1, 1))
    simulate(planner_named("fluid"), arrivals, scenario, Options(max_per_gpu=2), none_follows)
    assert used == [("a", 10.0, 10.0), ("b", 20.0, 20.0)]
