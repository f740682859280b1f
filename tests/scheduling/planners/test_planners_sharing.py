from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.plan import Allocation, Placement
from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster
from hetctl.model.training_progress import EpochHistory, Progress, TimedRate
from hetctl.model.workload import Slowed, Workload
from hetctl.perf.bounds import fluid_bound
from hetctl.perf.sharing import GpuTerms
from hetctl.perf.workloads import Workloads
from hetctl.scheduling.planners.base import Decision, Options, Request, RunningMember, allocations_after
from hetctl.scheduling.planners.fluid import FLUID
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

FOUR = Options(max_per_gpu=4)


def member(name: str, seconds: float, busy: float, memory: float = 0.0) -> Workload:
    return Workload(name, {1: 10.0}, 10.0 * seconds, busy=busy, memory=memory)


def ask(*members: Workload, gpus: int, held: tuple[RunningMember, ...] = (), **options: int) -> Request:
    nodes = Cluster.of(gpus, 4).nodes
    taken = {gpu for h in held for part in h.allocation.placement for gpu in part.gpus}
    free = tuple(replace(n, gpus=tuple(g for g in n.gpus if g not in taken)) for n in nodes)
    known = replace(FOUR, **options)
    return Request(members, free, gpus, 0, known, held=held, cluster=nodes)


def held_after(decision: Decision, *members: Workload) -> tuple[RunningMember, ...]:
    known = {one.name: one for one in members}
    return tuple(RunningMember(known[a.member], a, 0.0) for a in decision.start)


def run(members: list[Workload], gpus: int, options: Options = FOUR) -> Simulation:
    return simulate(FLUID, list(map(Arrival, members)), Scenario(Cluster.of(gpus, 4)), options)


def on_gpus(result: Simulation) -> dict[tuple[str, int], list[tuple[float, float, int, str]]]:
    found = defaultdict(list)
    for one in result.intervals:
        for part in one.allocation.placement:
            for gpu in part.gpus:
                found[part.node, gpu].append((one.start_s, one.end_s, part.seat, one.member))
    return found


def test_the_bound_counts_device_time_and_no_member_is_faster_than_alone() -> None:
    assert fluid_bound([member("a", 10, 0.5), member("b", 10, 0.5)], 1) == pytest.approx(10)
    assert fluid_bound([member("a", 10, 0.75), member("b", 10, 0.75)], 1) == pytest.approx(15)
    assert fluid_bound([member("a", 10, 0.1), member("b", 3, 0.1)], 4) == pytest.approx(10)


def test_members_sit_together_up_to_the_time_of_the_device() -> None:
    members = member("a", 10, 0.5), member("b", 10, 0.5), member("c", 10, 0.5)
    starts = FLUID.decide(ask(*members, gpus=1)).start
    assert [a.placement for a in starts] == [(Placement("node-0", (0,), 1),), (Placement("node-0", (0,), 2),)]
    result = run(list(members), 1)
    assert result.makespan_s == pytest.approx(15)
    assert result.gpu_busy_fraction == pytest.approx(1)


def test_one_that_can_wait_may_be_slowed_down_and_one_that_cannot_is_not() -> None:
    late, early = member("a", 10, 0.6), member("b", 4, 0.6)
    (alone,) = FLUID.decide(ask(late, early, gpus=1)).start
    assert alone.member == "a"
    three = [member(name, 10, 0.6) for name in "abc"]
    starts = FLUID.decide(ask(*three, gpus=1)).start
    assert [one.rate for one in starts] == pytest.approx([10 / 1.8] * 3)


def test_those_who_were_slower_together_than_one_after_the_other_sit_alone() -> None:
    for slowed, together in ((Slowed(1.9), 2), (Slowed(2.1), 1), (Slowed(2.1, 0.2), 2)):
        a, b = (
            replace(member(name, 10, 0.3), shape=name, slowed={"a": slowed, "b": slowed}) for name in "ab"
        )
        # A third one leaves them time to wait.
        starts = FLUID.decide(ask(a, b, member("c", 30, 1.0), gpus=2)).start
        assert len(starts) == 1 + together
        assert all(one.rate == pytest.approx(10 / slowed.factor) for one in starts if one.beside)
        # Beside one of another shape each is as fast as ever.
        assert len(FLUID.decide(ask(a, replace(b, shape="d"), member("c", 30, 1.0), gpus=2)).start) == 3


def test_members_that_turn_out_slower_together_are_taken_apart_as_soon_as_that_is_seen() -> None:
    configs = [Member(name, {"units": number}, max_gpus=1) for number, name in enumerate("abcd")]
    known = Workloads(
        Ensemble("e", "pytorch", Functions("m:i", "m:m"), tuple(configs), "/nowhere"),
        {},
        2,
        terms=GpuTerms(2),
    )
    alone = {m.name: TimedRate(10.0, 1, m.batch_size, None, 0.0, busy=0.4) for m in configs}
    history = {name: EpochHistory().with_rate(rate) for name, rate in alone.items()}
    known.update({name: Progress(name, done) for name, done in history.items()})
    starts = FLUID.decide(replace(ask(*known.left.values(), gpus=2), options=Options(max_per_gpu=2))).start
    seen = next(one for one in starts if one.beside)
    assert (len(starts), seen.rate) == (4, pytest.approx(10))
    slow = replace(alone[seen.member], rate=10 / 3, gpus=0, beside=seen.beside)
    known.update({seen.member: Progress(seen.member, history[seen.member].with_rate(slow))})
    held = held_after(Decision(starts), *known.left.values())
    after = allocations_after(request := ask(gpus=2, held=held, max_per_gpu=2), FLUID.decide(request))
    gpus = {name: one.placement[0].gpus for name, one in after.items()}
    assert len(gpus) == 4
    assert gpus[seen.member] != gpus[seen.beside[0]]


def test_memory_admits_no_more_than_there_is_and_a_large_member_sits_alone() -> None:
    members = member("a", 10, 0.2, 0.6), member("b", 10, 0.2, 0.5), member("c", 10, 0.2, 3.0)
    seats = defaultdict(list)
    for given_ in FLUID.decide(ask(*members, gpus=2)).start:
        seats[given_.placement[0].gpus].append(given_.member)
    assert sorted(map(sorted, seats.values())) in ([["a"], ["b"]], [["a"], ["c"]], [["b"], ["c"]])


def test_members_that_start_get_free_gpus_of_their_own() -> None:
    starts = FLUID.decide(ask(member("a", 10, 0.3), member("b", 10, 0.3), gpus=2)).start
    assert {a.placement[0].gpus for a in starts} == {(0,), (1,)}


def test_those_in_training_keep_their_seats_when_another_comes() -> None:
    a, b, c = member("a", 10, 0.4), member("b", 8, 0.4), member("c", 9, 0.2)
    held = held_after(FLUID.decide(ask(a, b, gpus=1)), a, b)
    decision = FLUID.decide(ask(c, gpus=1, held=held))
    assert (decision.stop, [x.placement for x in decision.start]) == ((), [(Placement("node-0", (0,), 3),)])


def on_one_gpu(gpu: int, *members: Workload) -> tuple[RunningMember, ...]:
    seats = ((one, (Placement("node-0", (gpu,), seat),)) for seat, one in enumerate(members, 1))
    return tuple(RunningMember(one, Allocation(one.name, 1, "dp", 1.0, place), 0.0) for one, place in seats)


def test_one_with_much_left_takes_the_place_of_one_that_can_wait_long_before_it_is_late() -> None:
    first, last = member("first", 100, 0.9), member("last", 300, 0.9)
    for left_s, starts in ((40, []), (300, ["waiting"])):
        held = on_one_gpu(0, first, last)
        decision = FLUID.decide(ask(member("waiting", left_s, 0.9), gpus=1, held=held, max_per_gpu=2))
        assert [one.member for one in decision.start] == starts
        assert decision.stop == ("first",) * len(starts)


def test_members_move_from_a_gpu_with_too_many_to_one_that_idles_if_the_restart_is_worth_it() -> None:
    for restart_s, moves in ((0.0, 1), (40.0, 0)):
        busy = (0.6, 0.4, 0.3)
        crowd = [replace(member(f"m{b}", 60, b), restart_s=restart_s) for b in busy]
        held = (*on_one_gpu(0, *crowd), *on_one_gpu(1, member("idle", 60, 0.7)))
        decision = FLUID.decide(ask(gpus=2, held=held))
        assert [one.member for one in decision.start] == ["m0.3"] * moves
        assert decision.stop == ()


@pytest.mark.parametrize(
    "crowd",
    [
        # Three times slower together, with too little memory, and with too little time of the device.
        [replace(member(name, 100, 0.3), slowed={"": Slowed(3.0)}) for name in "ab"],
        [member(name, 100, 0.3, 0.6) for name in "ab"],
        [member(f"m{busy}", 100, busy) for busy in (0.6, 0.4, 0.3)],
    ],
)
def test_those_who_fit_nowhere_else_before_the_limit_of_the_job_keep_their_seats(
    crowd: list[Workload],
) -> None:
    held = (*on_one_gpu(0, *crowd), *on_one_gpu(1, member("idle", 100, 0.1)))
    names = {one.workload.name for one in held}
    request = ask(member("new", 100, 0.3), gpus=3, held=held)
    assert names & {one.member for one in FLUID.decide(request).start}
    fixed = tuple(replace(one, fixed=True) for one in held)
    decision = FLUID.decide(replace(request, held=fixed))
    assert ([one.member for one in decision.start], decision.stop) == (["new"], ())


def test_a_move_that_fills_nothing_is_not_made_again_and_again() -> None:
    """By rounding, the three fill a little more wherever the second one moves."""
    first, second, third = (member(name, 100, busy) for name, busy in (("a", 0.59), ("b", 0.44), ("c", 0.59)))
    held = (*on_one_gpu(0, first, second), *on_one_gpu(1, third))
    assert FLUID.decide(ask(gpus=2, held=held)).start == ()


def test_nobody_shares_unless_it_is_permitted() -> None:
    starts = FLUID.decide(ask(member("a", 10, 0.2), member("b", 10, 0.2), gpus=1, max_per_gpu=1)).start
    assert [a.placement for a in starts] == [(Placement("node-0", (0,)),)]


members = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.floats(0.05, 1.0),
        st.floats(1.0, 1e4),
        st.floats(0.0, 0.7),
        st.floats(0.0, 60.0),
        st.floats(1.0, 1.9),
    ),
    min_size=1,
    max_size=14,
).map(
    lambda found: [
        Workload(
            f"m{number:02}",
            {gpus: 10 * gain ** (gpus - 1) for gpus in range(1, 1 + most)},
            left,
            busy=busy,
            memory=memory,
            restart_s=restart_s,
        )
        for number, (most, busy, left, memory, restart_s, gain) in enumerate(found)
    ]
)


@settings(max_examples=60, deadline=None)
@given(members=members, gpus=st.integers(1, 6), most=st.integers(1, 4))
def test_no_run_beats_the_bound_or_overfills_a_gpu(members: list[Workload], gpus: int, most: int) -> None:
    if most == 1:
        members = [replace(one, busy=1.0) for one in members]
    result = run(members, gpus, Options(max_per_gpu=most))
    assert result.ratio >= 1 - 1e-9
    assert {forecast.member for forecast in result.members} == {one.name for one in members}
    known = {one.name: one for one in members}
    for tasks in on_gpus(result).values():
        for at, end, _, _ in tasks:
            beside = [task for task in tasks if task[0] <= at < task[1]]
            assert len({seat for _, _, seat, _ in beside}) == len(beside) <= most
            assert len(beside) == 1 or all(seat for _, _, seat, _ in beside)
            assert len(beside) == 1 or sum(known[name].memory for *_, name in beside) <= 1 + 1e-6
            assert end >= at


def test_a_hundred_members_come_near_the_bound() -> None:
    draw = random.Random(3)
    some = [member(f"m{n:03}", draw.uniform(500, 5000), draw.uniform(0.15, 0.9), 0.25) for n in range(100)]
    assert run(some, 8, Options(max_per_gpu=4)).ratio < 1.03
