"""The scheduling of a job alone: events in, commands out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.events import ExitReason
from hetctl.model.plan import Allocation, Placement
from hetctl.model.site import Cluster, Node
from hetctl.model.workload import Workload
from hetctl.scheduling.commands import Command, EndJob, EndRound, ScheduleTick, Start, Stop
from hetctl.scheduling.events import (
    JobEnding,
    JobOpened,
    MemberArrived,
    NodeJoined,
    NodeLost,
    RateSeen,
    SchedulingEvent,
    TaskEnded,
    TaskSignalled,
    Tick,
)
from hetctl.scheduling.job_scheduler import (
    LAUNCH_PAUSES_S,
    LONGEST_LAUNCH_PAUSE_S,
    ObservedMembers,
    RunningTask,
)
from hetctl.scheduling.planners.base import Decision, Options, Planner, Request, RunningMember
from hetctl.scheduling.round_scheduler import POLL_S, RoundScheduler, should_stop


def one_each(request: Request) -> Decision:
    slots = [(node.name, gpu) for node in request.nodes for gpu in node.gpus]
    return Decision(
        tuple(on(c.name, node, gpu) for c, (node, gpu) in zip(request.workloads, slots, strict=False))
    )


def on(member: str, node: str, *gpus: int) -> Allocation:
    return Allocation(member, len(gpus), "data-parallel", 10.0 * len(gpus), (Placement(node, gpus),))


GLOBAL, LOCAL = Planner("global", "global", one_each), Planner("local", "local", one_each)
GROUP = Planner("group", "global", one_each, trains_as_group=True)


@dataclass
class Bench:
    """One job with members whose remaining work is given."""

    planner: Planner
    names: str
    nodes: tuple[Node, ...] = Cluster.of(4, 2).nodes
    deadline_s: float = math.inf
    limit: str | None = None
    shapes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members = {name: self.member(name) for name in self.names}
        self.core = RoundScheduler(self.planner, Options(), self)
        self.opening = self.core.handle(JobOpened(0.0, self.nodes, self.deadline_s, 5, "remembered"))

    def member(self, name: str) -> Workload:
        rates, shape = {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0}, self.shapes.get(name, "")
        return Workload(name, rates, 1000.0, 1000, fuses=shape, fused={1: 5.0, 4: 10.0})

    def left(self, _now_s: float) -> Mapping[str, Workload]:
        return self.members

    def seen(
        self, _now_s: float, running: Mapping[str, RunningTask], deferred: AbstractSet[str]
    ) -> ObservedMembers:
        waiting = [c for name, c in self.members.items() if name not in running and name not in deferred]
        held = (
            RunningMember(self.members[name], step.task.allocation, step.since_s)
            for name, step in running.items()
            if not step.stopping
        )
        return ObservedMembers(self.members, waiting, tuple(held))

    def used_up(self) -> str | None:
        return self.limit

    def at(self, now_s: float, *events: SchedulingEvent) -> list[Command]:
        """Send the events of a time; return the commands except `ScheduleTick`."""
        return [command for command in self.all_at(now_s, *events) if not isinstance(command, ScheduleTick)]

    def all_at(self, now_s: float, *events: SchedulingEvent) -> list[Command]:
        commands = self.core.handle(Tick(now_s))
        for event in events:
            commands += self.core.handle(event)
        return commands + self.core.schedule(now_s)

    def done(self, now_s: float, name: str) -> SchedulingEvent:
        """Let a member converge."""
        del self.members[name]
        return TaskEnded(now_s, name, ExitReason.FINISHED)


def placed(commands: Sequence[Command]) -> dict[str, Allocation]:
    starts = [command for command in commands if isinstance(command, Start)]
    return {task.name: task.allocation for start in starts for task in start.tasks}


def test_rounds_count_on_and_carry_what_the_planner_remembers() -> None:
    asked: list[Any] = []

    def decide(request: Request) -> Decision:
        asked.append((request.planner_state, request.round_index))
        return replace(one_each(request), planner_state="new")

    (start,) = Bench(Planner("p", "global", decide), "ab").at(0.0)
    assert isinstance(start, Start)
    assert asked == [("remembered", 5)]
    assert (start.round, start.planner_state, start.predicted_s) == (5, "new", 100.0)
    assert [task.name for task in start.tasks] == ["a", "b"]


def test_global_planners_wait_for_all_gpus_local_ones_for_any() -> None:
    for planner, next_ones in ((GLOBAL, []), (LOCAL, ["e"])):
        bench = Bench(planner, "abcdef")
        assert sorted(placed(bench.at(0.0))) == list("abcd")
        assert list(placed(bench.at(1.0, bench.done(1.0, "a")))) == next_ones
    bench = Bench(GLOBAL, "ab")
    bench.at(0.0)
    assert bench.at(1.0, bench.done(1.0, "a")) == []
    assert bench.at(2.0, bench.done(2.0, "b")) == [EndRound(5, "converged"), EndJob("finished")]


def test_simultaneous_events_lead_to_one_plan() -> None:
    bench = Bench(LOCAL, "abcdef")
    bench.at(0.0)
    assert list(placed(bench.at(1.0, bench.done(1.0, "a"), bench.done(1.0, "b")))) == ["e", "f"]


def test_a_member_that_arrives_gets_what_is_free() -> None:
    bench = Bench(LOCAL, "a")
    bench.at(0.0)
    bench.members["new"] = bench.member("new")
    assert list(placed(bench.at(1.0, MemberArrived(1.0, "new")))) == ["new"]


def test_a_node_that_joins_is_used() -> None:
    bench = Bench(LOCAL, "abc", Cluster.of(2, 2).nodes)
    assert list(placed(bench.at(0.0))) == ["a", "b"]
    assert placed(bench.at(1.0, NodeJoined(1.0, Node("late", (0,))))) == {"c": on("c", "late", 0)}


def test_too_few_active_gpus_stop_a_round_and_a_new_plan_follows() -> None:
    bench = Bench(GROUP, "abcdef")
    bench.at(0.0)
    assert bench.at(1.0, bench.done(1.0, "a")) == [Stop(5, "alpha")]
    assert (
        bench.at(2.0, TaskEnded(2.0, "b", ExitReason.STOPPED), TaskEnded(2.0, "c", ExitReason.STOPPED)) == []
    )
    ended, start = bench.at(3.0, TaskEnded(3.0, "d", ExitReason.STOPPED))
    assert ended == EndRound(5, "alpha")
    assert list(placed([start])) == list("bcde")


def moved(request: Request) -> Decision:
    """Give a the GPUs of b, too, once somebody is in training."""
    if not request.held:
        return one_each(request)
    return Decision((on("a", "node-0", 0, 1),), stop=("b",)) if len(request.held) == 2 else Decision()


def test_gpus_are_waited_for_that_others_are_about_to_leave() -> None:
    bench = Bench(Planner("p", "elastic", moved), "ab", Cluster.of(2, 2).nodes)
    bench.at(0.0)
    assert bench.all_at(1.0) == []
    bench.core.handle(RateSeen(1.0, "a", 20.0))
    assert bench.at(1.5) == [Stop(5, "preempted", "b"), Stop(5, "resize", "a")]
    assert bench.at(2.0, RateSeen(2.0, "a", 50.0), TaskEnded(2.0, "a", ExitReason.STOPPED)) == []
    ended, start = bench.at(3.0, TaskEnded(3.0, "b", ExitReason.STOPPED))
    assert ended == EndRound(5, "preempted")
    assert placed([start]) == {"a": on("a", "node-0", 0, 1)}


def test_an_expected_rate_triggers_no_call_of_an_elastic_planner() -> None:
    asked: list[float] = []

    def decide(request: Request) -> Decision:
        asked.append(request.now_s)
        return Decision() if request.held else one_each(request)

    bench = Bench(Planner("p", "elastic", decide), "a")
    bench.at(0.0)
    bench.at(1.0, RateSeen(1.0, "a", 9.0))
    assert asked == [0.0]
    bench.at(2.0, RateSeen(2.0, "a", 5.0))
    bench.at(3.0, RateSeen(3.0, "a", 5.0))
    assert asked == [0.0, 2.0]


def test_the_planner_is_called_at_its_time_but_not_too_often() -> None:
    asked: list[float] = []

    def decide(request: Request) -> Decision:
        asked.append(request.now_s)
        replan_at_s = {0.0: 8.0}.get(request.now_s)
        return Decision(one_each(request).start if not request.held else (), replan_at_s=replan_at_s)

    bench = Bench(Planner("p", "elastic", decide), "a")
    assert bench.all_at(0.0)[-1] == ScheduleTick(8.0)
    assert bench.all_at(8.0) == []
    assert bench.all_at(8.01, MemberArrived(8.01, "b")) == [ScheduleTick(8.0 + POLL_S)]
    bench.at(8.0 + POLL_S)
    assert asked == [0.0, 8.0, 8.0 + POLL_S]


@pytest.mark.parametrize("planner", [GLOBAL, LOCAL], ids=["global", "local"])
def test_a_member_that_got_a_signal_leaves_and_is_planned_anew(planner: Planner) -> None:
    bench = Bench(planner, "a")
    bench.at(0.0)
    assert bench.at(1.0, TaskSignalled(1.0, "a"), TaskSignalled(1.0, "a")) == [Stop(5, "signal", "a")]
    ended, start = bench.at(2.0, TaskEnded(2.0, "a", ExitReason.STOPPED))
    assert ended == EndRound(5, "signal")
    assert list(placed([start])) == ["a"]


def test_a_signal_to_a_member_that_is_leaving_changes_nothing() -> None:
    bench = Bench(LOCAL, "abcdef")
    bench.at(0.0)
    assert bench.at(1.0, JobEnding(1.0, "time")) == [Stop(5, "time", at_once=True)]
    assert bench.at(1.5, TaskSignalled(1.5, "a")) == []
    ends = [TaskEnded(2.0, name, ExitReason.STOPPED) for name in list(bench.core.running)]
    assert bench.at(2.0, *ends) == [EndRound(5, "time"), EndJob("time")]


def test_a_job_continues_until_its_last_node_is_lost() -> None:
    bench = Bench(LOCAL, "abcdef")
    bench.at(0.0)
    lost = [TaskEnded(1.0, name, ExitReason.NODE_FAILURE) for name in "ab"]
    assert bench.at(1.0, *lost, NodeLost(1.0, "node-0")) == []
    assert placed(bench.at(2.0, bench.done(2.0, "c"))) == {"a": on("a", "node-1", 0)}
    last = [TaskEnded(3.0, name, ExitReason.NODE_FAILURE) for name in "da"]
    assert bench.at(3.0, *last, NodeLost(3.0, "node-1"))[-1] == EndJob("node-failure")


def test_a_rate_that_was_a_guess_triggers_a_call_whatever_it_is() -> None:
    asked: list[list[int]] = []

    def decide(request: Request) -> Decision:
        known = [*request.workloads, *(held.workload for held in request.held)]
        asked.append(list(known[0].rates))
        return one_each(request)

    bench = Bench(Planner("p", "elastic", decide), "a")
    known = bench.members["a"]
    bench.members["a"] = replace(known, spread=dict.fromkeys(known.rates, 1.0))
    bench.at(0.0)
    bench.members["a"] = known
    bench.at(1.0, RateSeen(1.0, "a", 10.0))
    bench.at(2.0, RateSeen(2.0, "a", 10.0))
    assert asked == [[1], [1, 2, 3, 4]]


def test_a_returned_node_is_used_once_its_last_group_has_ended() -> None:
    def widest_first(request: Request) -> Decision:
        """Give the first member all free nodes."""
        places = tuple(Placement(node.name, node.gpus) for node in request.nodes)
        name, gpus = request.workloads[0].name, sum(len(place.gpus) for place in places)
        return Decision((Allocation(name, gpus, "data-parallel", 10.0, places),))

    bench = Bench(Planner("p", "local", widest_first), "ab", Cluster.of(2, 1).nodes)
    first, second = bench.nodes
    assert placed(bench.at(0.0))["a"].gpus == 2
    assert bench.at(1.0, NodeLost(1.0, first.name)) == []
    assert bench.at(1.5, NodeJoined(1.5, first)) == []
    commands = bench.at(2.0, TaskEnded(2.0, "a", ExitReason.NODE_FAILURE))
    assert {p.node for p in placed(commands)["a"].placement} == {first.name, second.name}


def test_no_member_waits_for_gpus_of_a_lost_node() -> None:
    bench = Bench(Planner("p", "elastic", moved), "ab", Cluster.of(4, 2).nodes)
    bench.at(0.0)
    bench.at(1.0, RateSeen(1.0, "a", 50.0))
    lost = [TaskEnded(2.0, name, ExitReason.NODE_FAILURE) for name in "ab"]
    commands = bench.at(2.0, *lost, NodeLost(2.0, "node-0"))
    assert placed(commands) == {"a": on("a", "node-1", 0), "b": on("b", "node-1", 1)}


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (JobEnding(1.0, "signal"), "signal"),
        (TaskEnded(1.0, "a", ExitReason.DISK_FULL), "disk-full"),
        (Tick(50.0), "deadline"),
    ],
)
def test_when_the_job_ends_all_leave_and_the_first_reason_stands(event: SchedulingEvent, reason: str) -> None:
    bench = Bench(LOCAL, "abcdef", deadline_s=50.0)
    bench.members = {name: replace(c, samples_per_epoch=10) for name, c in bench.members.items()}
    bench.at(0.0)
    commands = bench.at(event.now_s, event, JobEnding(event.now_s, "later"))
    assert [c for c in commands if isinstance(c, Stop)] == [Stop(5, reason, at_once=True)]
    ends = [TaskEnded(60.0, name, ExitReason.STOPPED) for name in list(bench.core.running)]
    assert bench.at(60.0, *ends)[-1] == EndJob(reason)


@pytest.mark.parametrize("reason", list(LAUNCH_PAUSES_S))
def test_after_a_failed_launch_nothing_starts_during_the_pause(reason) -> None:
    bench = Bench(LOCAL, "a")
    bench.at(0.0)
    commands = bench.all_at(1.0, TaskEnded(1.0, "a", reason))
    assert commands == [EndRound(5, "failed"), ScheduleTick(1.0 + LAUNCH_PAUSES_S[reason])]
    assert list(placed(bench.at(1.0 + LAUNCH_PAUSES_S[reason]))) == ["a"]


def test_pauses_after_failed_launches_in_a_row_get_longer() -> None:
    bench, now_s, pauses = Bench(LOCAL, "ab"), 0.0, []
    bench.at(now_s)
    for _ in range(5):
        # The end of another member, which the same error ends at the same time, adds nothing.
        ends = [TaskEnded(now_s, name, ExitReason.DISK_ERROR) for name in "ab"]
        (tick,) = [c for c in bench.all_at(now_s, *ends) if isinstance(c, ScheduleTick)]
        pauses.append(tick.at_s - now_s)
        now_s = tick.at_s
        bench.at(now_s)
    assert pauses == [30.0, 60.0, 120.0, 240.0, LONGEST_LAUNCH_PAUSE_S]
    assert list(placed(bench.at(now_s + 1.0, TaskEnded(now_s, "a", ExitReason.STOPPED)))) == ["a"]
    (*_, tick) = bench.all_at(now_s + 2.0, TaskEnded(now_s + 2.0, "a", ExitReason.DISK_ERROR))
    assert tick == ScheduleTick(now_s + 32.0)


def test_a_used_up_budget_ends_the_job_before_the_next_round() -> None:
    bench = Bench(LOCAL, "abcde")
    bench.at(0.0)
    bench.limit = "--max-rounds 1 is reached"
    commands = bench.at(1.0, bench.done(1.0, "a"))
    assert commands == [Stop(5, bench.limit, at_once=True)]


def test_a_job_without_room_ends_with_the_refused_member() -> None:
    bench = Bench(LOCAL, "ab", deadline_s=150.0)
    assert list(placed(bench.at(0.0))) == ["a", "b"]
    ends = [TaskEnded(60.0, name, ExitReason.KILLED) for name in "ab"]
    assert bench.at(60.0, *ends) == [EndRound(5, "failed"), EndJob("deadline", ("a", 100.0))]


def test_a_member_without_room_restarts_on_more_gpus_only() -> None:
    def all_to_the_first(request: Request) -> Decision:
        if not request.workloads or len(request.workloads) > 1:
            return one_each(request)
        gpus = [gpu for node in request.nodes for gpu in node.gpus][:2]
        return Decision((on(request.workloads[0].name, request.nodes[0].name, *gpus),))

    bench = Bench(Planner("p", "elastic", all_to_the_first), "ab", Cluster.of(2, 2).nodes, 500.0)
    bench.at(0.0)
    assert bench.at(1.0, TaskEnded(1.0, "a", ExitReason.STOPPED, no_room=True)) == []
    commands = bench.at(9.0, bench.done(9.0, "b"))
    assert placed(commands) == {"a": on("a", "node-0", 0, 1)}


@given(
    st.sampled_from([GLOBAL, LOCAL, GROUP, Planner("p", "elastic", one_each)]),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["done", "told", "failed", "lost", "away"]))),
)
def test_no_gpu_is_given_twice_and_every_job_comes_to_its_end(
    planner: Planner, members: int, happenings: list[tuple[int, str]]
) -> None:
    bench = Bench(planner, "abcdefghi"[:members], Cluster.of(6, 2).nodes)
    held: dict[str, Allocation] = {}
    up = {node.name for node in bench.nodes}
    commands = bench.at(0.0)
    for now_s, (index, what) in enumerate([*happenings, *[(0, "done")] * 99], start=1):
        for name, allocation in placed(commands).items():
            gpus = {(p.node, gpu) for a in held.values() for p in a.placement for gpu in p.gpus}
            assert gpus.isdisjoint((p.node, gpu) for p in allocation.placement for gpu in p.gpus)
            assert {part.node for part in allocation.placement} <= up
            held[name] = allocation
        if isinstance(commands[-1] if commands else None, EndJob):
            break
        assert held, "a job with nobody in training and no end"
        name = sorted(held)[index % len(held)]
        commands = bench.at(now_s, *ended(bench, up, held, name, what, float(now_s)))
    assert not held
    assert isinstance(commands[-1], EndJob)


def ended(
    bench: Bench, up: set[str], held: dict[str, Allocation], name: str, what: str, now_s: float
) -> list[SchedulingEvent]:
    """Let a step end, or its node fail with all that trains on it; one that is away returns at once."""
    if what in ("lost", "away"):
        (node,) = {part.node for part in held[name].placement}
        if what == "lost":
            up.discard(node)
        there = [n for n, a in held.items() if a.placement[0].node == node]
        for other in there:
            del held[other]
        back = [NodeJoined(now_s, each) for each in bench.nodes if each.name == node and what == "away"]
        return [*(TaskEnded(now_s, n, ExitReason.NODE_FAILURE) for n in there), NodeLost(now_s, node), *back]
    del held[name]
    if what == "done":
        return [bench.done(now_s, name)]
    return [TaskEnded(now_s, name, ExitReason.STOPPED if what == "told" else ExitReason.KILLED)]


@pytest.mark.parametrize(
    ("active", "allocated", "alpha", "waiting", "stops"),
    [
        ({"a": 5, "b": 3}, 10, 0.8, True, False),
        ({"a": 4, "b": 3}, 10, 0.8, True, True),
        ({"a": 1}, 10, 0.8, True, True),
        # The round is over.
        ({}, 10, 0.8, True, False),
        # M are the GPUs of the round, not of the cluster.
        ({"a": 1}, 1, 0.8, True, False),
        # A new plan would change nothing for members with all the GPUs that they may have, a 2 and b 1.
        ({"a": 2, "b": 1}, 10, 0.8, False, False),
        ({"a": 1, "b": 1}, 10, 0.8, False, True),
        ({"a": 2, "b": 1}, 10, 0.8, True, True),
        ({"a": 1}, 10, 0.0, True, False),
        ({"a": 9}, 10, 1.0, True, True),
    ],
)
def test_a_round_stops_below_alpha_of_its_gpus(
    active: dict[str, int], allocated: int, alpha: float, waiting: bool, stops: bool
) -> None:
    assert should_stop(active, allocated, alpha, waiting=waiting, max_gpus={"a": 2, "b": 1}) is stops


SHAPES = dict.fromkeys("abcdef", "small") | {"x": "large"}


def fusing(planner: Planner, names: str, gpus: int) -> Bench:
    """Return a job whose members of `SHAPES` may train fused."""
    return Bench(planner, names, Cluster.of(gpus, gpus).nodes, shapes=SHAPES)


def seats(commands: Sequence[Command]) -> dict[str, tuple[str, int, int]]:
    found = {name: (a.mode, a.placement[0]) for name, a in placed(commands).items()}
    return {name: (mode, place.gpus[0], place.seat) for name, (mode, place) in found.items()}


def test_members_that_wait_join_those_of_their_shape_evenly() -> None:
    bench = fusing(LOCAL, "abxcdey", 3)
    started = bench.at(0.0)
    # Two of them are 2 ** 0.5 times as fast as one, and four twice as fast.
    rates = {"a": 10 * 3**0.5 / 3, "b": 10 * 2**0.5 / 2, "x": 10.0}
    assert {name: placed(started)[name].rate for name in "abx"} == pytest.approx(rates)
    assert seats(started) == {
        "a": ("fused", 0, 1),
        "b": ("fused", 1, 1),
        "x": ("data-parallel", 2, 0),
        "c": ("fused", 0, 2),
        "d": ("fused", 1, 2),
        "e": ("fused", 0, 3),
    }
    assert bench.core.pool.free_gpus == 0


def test_two_members_try_what_their_shape_gains_before_others_join() -> None:
    bench = fusing(LOCAL, "abcd", 1)
    bench.members = {name: replace(one, fused={}) for name, one in bench.members.items()}
    assert seats(bench.at(0.0)) == {"a": ("fused", 0, 1), "b": ("fused", 0, 2)}
    assert bench.at(1.0, RateSeen(1.0, "a", 9.0)) == []
    bench.members = {name: bench.member(name) for name in bench.members}
    assert seats(bench.at(2.0, RateSeen(2.0, "a", 9.0))) == {"c": ("fused", 0, 3), "d": ("fused", 0, 4)}


def test_a_member_keeps_the_gpu_of_the_first_and_another_takes_a_free_seat() -> None:
    bench = fusing(LOCAL, "abx", 1)
    bench.at(0.0)
    assert bench.at(1.0, bench.done(1.0, "a")) == []
    bench.members["f"] = bench.member("f")
    assert seats(bench.at(2.0, MemberArrived(2.0, "f"))) == {"f": ("fused", 0, 1)}
    bench.at(3.0, bench.done(3.0, "b"))
    assert seats(bench.at(4.0, bench.done(4.0, "f"))) == {"x": ("data-parallel", 0, 0)}


def test_members_join_one_that_is_alone_on_a_gpu_that_may_be_shared_and_none_of_several() -> None:
    def decide(request: Request) -> Decision:
        first, second, third = (replace(each, alone=True) for each in one_each(request).start)
        sits = [
            replace(each, placement=(Placement(first.placement[0].node, (gpu,), seat),), beside=beside)
            for each, gpu, seat, beside in ((first, 0, 1, ()), (second, 1, 1, ("c",)), (third, 1, 2, ("b",)))
        ]
        return Decision(tuple(sits))

    started = fusing(Planner("p", "local", decide), "abcd", 3).at(0.0)
    assert seats(started) == {
        "a": ("fused", 0, 1),
        "b": ("data-parallel", 1, 1),
        "c": ("data-parallel", 1, 2),
        "d": ("fused", 0, 2),
    }
    assert [each.alone for each in placed(started).values()] == [False, True, True, False]


def test_no_member_takes_a_seat_on_a_gpu_that_another_is_still_leaving() -> None:
    """Who leaves keeps its part of the memory until its checkpoint is written."""
    seat_of = {"a": 1, "b": 2}

    def decide(request: Request) -> Decision:
        held = {one.workload.name for one in request.held}
        new = {one.name: seat_of[one.name] for one in request.workloads if one.name in seat_of}
        start = [
            replace(on(name, "node-0", 0), placement=(Placement("node-0", (0,), seat),))
            for name, seat in new.items()
        ]
        return Decision(tuple(start), tuple(held.difference(seat_of)))

    bench = Bench(Planner("p", "elastic", decide), "ab", Cluster.of(1, 1).nodes)
    assert seats(bench.at(0.0)) == {"a": ("data-parallel", 0, 1), "b": ("data-parallel", 0, 2)}
    del seat_of["a"]
    seat_of["c"] = 3
    bench.members["c"] = bench.member("c")
    (told,) = bench.at(1.0, MemberArrived(1.0, "c"))
    assert isinstance(told, Stop)
    assert seats(bench.at(2.0, TaskEnded(2.0, "a", ExitReason.STOPPED))) == {"c": ("data-parallel", 0, 3)}


def test_members_that_cannot_train_fused_wait_and_train_alone() -> None:
    bench = fusing(LOCAL, "abc", 1)
    bench.at(0.0)
    # The first stays, and no one joins it again.
    assert placed(bench.at(1.0, TaskEnded(1.0, "c", ExitReason.STOPPED, alone=True))) == {}
    assert placed(bench.at(2.0, TaskEnded(2.0, "b", ExitReason.STOPPED, alone=True))) == {}
    assert seats(bench.at(3.0, bench.done(3.0, "a"))) == {"b": ("data-parallel", 0, 0)}


def test_an_elastic_planner_sees_neither_fused_members_nor_their_gpus() -> None:
    asked: list[Request] = []

    def decide(request: Request) -> Decision:
        asked.append(request)
        return one_each(request)

    bench = fusing(Planner("p", "elastic", decide), "abcx", 2)
    bench.at(0.0)
    bench.members["y"] = bench.member("y")
    bench.at(1.0, MemberArrived(1.0, "y"))
    assert [held.workload.name for held in asked[-1].held] == ["b"]
    assert (asked[-1].gpus, asked[-1].cluster[0].gpus) == (1, (1,))
