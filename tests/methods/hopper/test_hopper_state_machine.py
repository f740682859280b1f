"""The hopper's state machine, driven by executors that finish, fail, restart and change their minds."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.hopper.hop_plans import Rescheduler
from hetctl.methods.hopper.schedule import SearchOptions, UnitTimes
from hetctl.methods.hopper.state_machine import Hopper
from hetctl.model.hops import Unit, Visit

CONFIGS, PARTITIONS = ("a", "b", "c", "d"), ("p0", "p1", "p2")
HOMES = {"w0": ("p0",), "w1": ("p1", "p0"), "w2": ("p2",), "w3": ("p2", "p1")}
UNITS = [Unit(config, 0, partition) for config, partition in product(CONFIGS, PARTITIONS)]
SECONDS = [
    [
        [i + 2 * j + k + 1 if PARTITIONS[j] in homes else np.inf for k, homes in enumerate(HOMES.values())]
        for j in range(3)
    ]
    for i in range(4)
]
RESCHEDULE = Rescheduler(
    UnitTimes(CONFIGS, PARTITIONS, tuple(HOMES), np.array(SECONDS)),
    dict.fromkeys(CONFIGS, 1),
    SearchOptions(seconds=0),
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Visit, ...]:
    """Return some of the units in any order, on any worker: plans may be torn, or nonsense."""
    units = draw(st.permutations(UNITS))[: draw(st.integers(0, len(UNITS)))]
    return tuple(Visit(i, *unit, draw(st.sampled_from([*HOMES, "w9"]))) for i, unit in enumerate(units))


def hopper_with(plan=(), seed=0, homes=HOMES, configs=CONFIGS, reschedule=None) -> Hopper:
    hopper = Hopper(PARTITIONS, seed=seed, plan=plan, reschedule=reschedule)
    for worker, partitions in homes.items():
        hopper.worker_joins(worker, partitions)
    for config in configs:
        hopper.config_joins(config)
    return hopper


class Executor:
    """Executor of a hopper's visits that checks its invariants."""

    def __init__(self, hopper: Hopper, homes=HOMES) -> None:
        self.hopper, self.homes = hopper, homes
        self.now_s = 0.0
        self.alive = set(homes)
        self.running: dict[str, Visit] = {}
        self.orders: list[Visit] = []

    def dispatch(self) -> None:
        self.now_s += 1
        for visit in self.hopper.dispatch(self.now_s):
            assert visit.worker in self.alive
            assert visit.partition in self.homes[visit.worker]
            assert visit.worker not in self.running, "exclusive access"
            assert visit.config not in {other.config for other in self.running.values()}, "isolation"
            self.running[visit.worker] = visit
            self.orders.append(visit)
        assert self.hopper.running == self.running
        if not self.hopper.plan:
            assert not self.ready(), "nobody waits while there is something to do"

    def ready(self) -> list[Unit]:
        """Return the units that an idle worker could process."""
        taken = {visit.unit for visit in (*self.hopper.log, *self.running.values())}
        at_hand = {p for worker in self.alive - self.running.keys() for p in self.homes[worker]}
        idle = self.hopper.configs.keys() - {visit.config for visit in self.running.values()}
        return [u for u in UNITS if u not in taken and u.config in idle and u.partition in at_hand]

    def finish(self, at: int) -> None:
        if self.running:
            visit = self.running.pop(sorted(self.running)[at % len(self.running)])
            assert self.hopper.unit_done(visit)
            assert not self.hopper.unit_done(visit), "a report that comes twice counts once"

    def fail_unit(self, at: int) -> None:
        if self.running:
            self.hopper.unit_failed(self.running.pop(sorted(self.running)[at % len(self.running)]))

    def fail(self, at: int) -> None:
        worker = sorted(self.homes)[at % len(self.homes)]
        lost = self.hopper.worker_fails(worker)
        assert lost == self.running.pop(worker, None)
        self.alive.discard(worker)
        assert lost is None or not self.hopper.unit_done(lost), "a report that comes too late"

    def come(self, at: int) -> None:
        worker = sorted(self.homes)[at % len(self.homes)]
        self.hopper.worker_joins(worker, self.homes[worker])
        self.running.pop(worker, None)
        self.alive.add(worker)

    def live(self, story) -> None:
        for event, at, dispatched in story:
            if dispatched:
                self.dispatch()
            EVENTS[event](self, at)

    def work(self) -> None:
        """Do all that is left, with every worker."""
        for at in range(len(self.homes)):
            if sorted(self.homes)[at] not in self.alive:
                self.come(at)
        while not self.hopper.is_over:
            self.dispatch()
            assert self.running, "a standstill"
            self.finish(0)


EVENTS = {
    "finish": Executor.finish,
    "fail_unit": Executor.fail_unit,
    "fail": Executor.fail,
    "come": Executor.come,
}
STORIES = st.lists(
    st.tuples(st.sampled_from([*["finish"] * 4, *EVENTS]), st.integers(0, 3), st.booleans()), max_size=40
)


@given(
    plan=st.just(()) | plans(),
    story=STORIES,
    seed=st.integers(0, 9),
    reschedule=st.sampled_from([None, RESCHEDULE]),
)
def test_every_unit_is_done_once_whatever_happens(plan, story, seed, reschedule):
    executor = Executor(hopper_with(plan, seed, reschedule=reschedule))
    executor.live(story)
    executor.work()
    assert Counter(visit.unit for visit in executor.hopper.log) == Counter(UNITS)
    assert all(executor.hopper.has_finished(config) for config in CONFIGS)


@settings(max_examples=60)
@given(first=STORIES, second=STORIES, seed=st.integers(0, 9))
def test_a_replay_from_the_log_gives_the_same_order(first, second, seed):
    original = Executor(hopper_with(seed=seed))
    original.live(first)
    original.work()
    replay = Executor(hopper_with(original.hopper.log, seed + 1))
    for _, at, _ in second:  # other units end first this time
        replay.dispatch()
        replay.finish(at)
    replay.work()
    for of in ("config", "worker"):
        for name in (*CONFIGS, *HOMES):
            before, after = (
                [visit.unit for visit in one.hopper.log if getattr(visit, of) == name]
                for one in (original, replay)
            )
            assert before == after
    assert {v.unit: v.worker for v in original.hopper.log} == {v.unit: v.worker for v in replay.hopper.log}


@settings(max_examples=20)
@given(seed=st.integers(0, 99))
def test_the_same_seed_draws_the_same(seed):
    one, other = (Executor(hopper_with(seed=seed)) for _ in range(2))
    one.work()
    other.work()
    assert one.orders == other.orders


def test_any_ready_unit_may_be_drawn():
    drawn = {hopper_with(seed=seed).dispatch()[0].unit for seed in range(200)}
    assert drawn == {Unit(config, 0, "p0") for config in CONFIGS}


def test_a_unit_that_may_not_start_keeps_no_worker_idle():
    for seed in range(20):
        hopper = hopper_with(seed=seed, homes={"w0": ("p0",)}, configs=("a", "b"))
        (visit,) = hopper.dispatch(may_start=lambda unit, _: unit.config != "a")
        assert visit.config == "b"


def test_planned_units_wait_for_their_turn():
    """B is planned on w2 before w0: w0 waits for it, although it could have had it first."""
    plan = [Visit(0, "a", 0, "p0", "w0"), Visit(1, "b", 0, "p2", "w2"), Visit(2, "b", 0, "p0", "w0")]
    hopper = hopper_with([*plan], homes={"w0": ("p0",)}, configs=("a", "b"))
    (first,) = hopper.dispatch()
    assert first.unit == Unit("a", 0, "p0")
    hopper.worker_joins("w2", ["p2"])
    (second,) = hopper.dispatch()
    assert second.unit == Unit("b", 0, "p2")
    hopper.unit_done(first)
    assert hopper.dispatch() == ()
    hopper.unit_done(second)
    assert {visit.unit for visit in hopper.dispatch()} == {Unit("b", 0, "p0"), Unit("a", 0, "p2")}


def test_another_worker_with_the_partition_takes_over():
    plan = tuple(Visit(i, config, 0, "p0", "w0") for i, config in enumerate(CONFIGS))
    hopper = Hopper(["p0"], plan=plan)
    hopper.worker_joins("w0", ["p0"])
    hopper.worker_joins("w1", ["p0"])
    for config in CONFIGS:
        hopper.config_joins(config)
    (started,) = hopper.dispatch()
    assert (started.config, started.worker) == ("a", "w0")
    assert hopper.worker_fails("w0") == started
    (again,) = hopper.dispatch()
    assert again.worker == "w1"
    assert hopper.stranded == ()
    hopper.worker_joins("w0", ["p0"])
    (back,) = hopper.dispatch()
    assert back.worker == "w0"
    assert back.unit != again.unit


def test_a_worker_that_missed_turns_does_not_delay_the_others():
    """The plan has p0 first for everybody; when w0 comes late, all others still go by their turns."""
    plan = [Visit(i, c, 0, p, "w" + p[1]) for i, (p, c) in enumerate(product(PARTITIONS[:2], CONFIGS))]
    hopper = Hopper(PARTITIONS[:2], plan=plan)
    hopper.worker_joins("w1", ["p1"])
    for config in CONFIGS:
        hopper.config_joins(config)
    (first,) = hopper.dispatch()
    hopper.unit_done(first)
    hopper.worker_joins("w0", ["p0"])
    started = {visit.worker: visit.config for visit in hopper.dispatch()}
    assert started["w1"] == CONFIGS[1]
    assert started["w0"] in (CONFIGS[0], *CONFIGS[2:])
    assert [visit.partition for visit in hopper.plan] == ["p1"] * 4


def test_partitions_without_a_worker_are_named():
    hopper = hopper_with(homes={"w0": ("p0",)})
    assert hopper.stranded == ("p1", "p2")
    hopper.worker_joins("late", ["p2"])
    assert hopper.stranded == ("p1",)


def test_a_worker_that_comes_back_unnoticed_has_lost_its_unit():
    hopper = hopper_with(homes={"w0": ("p0",)}, configs=("a",))
    (visit,) = hopper.dispatch()
    hopper.worker_joins("w0", ["p0"])
    (again,) = hopper.dispatch()
    assert again.unit == visit.unit
    assert again.number != visit.number
    assert not hopper.unit_done(visit)
    assert hopper.unit_done(again)


def test_configurations_join_late_stop_and_continue():
    executor = Executor(hopper_with(configs=("a", "b")))
    executor.dispatch()
    visit = next(visit for visit in executor.running.values() if visit.config == "a")
    executor.hopper.config_stops("a")
    executor.hopper.config_stops("nobody")
    executor.hopper.config_joins("c")
    assert executor.hopper.unit_done(executor.running.pop(visit.worker)), "what runs goes on to its end"
    executor.hopper.dispatch()
    assert "a" not in {other.config for other in executor.hopper.running.values()}
    executor.running = dict(executor.hopper.running)
    executor.hopper.config_joins("a")
    while not executor.hopper.is_over:
        executor.finish(0)
        executor.running = {**executor.running, **{v.worker: v for v in executor.hopper.dispatch()}}
    done = Counter(visit.unit for visit in executor.hopper.log)
    assert done == Counter(unit for unit in UNITS if unit.config in "abc")


def test_a_unit_of_a_stopped_configuration_that_fails_is_dropped():
    hopper = hopper_with(homes={"w0": ("p0",)}, configs=("a",))
    (visit,) = hopper.dispatch()
    hopper.config_stops("a")
    hopper.unit_failed(visit)
    assert hopper.is_over


def test_epochs_follow_each_other():
    executor = Executor(hopper_with())
    executor.dispatch()
    executor.work()
    executor.hopper.config_joins("a", 1)
    executor.work()
    assert [visit.epoch for visit in executor.hopper.log if visit.config == "a"] == [0, 0, 0, 1, 1, 1]


def test_a_plan_may_come_or_change_on_the_way():
    hopper = hopper_with(homes={"w0": ("p0",)})
    (first,) = hopper.dispatch()
    rest = [config for config in reversed(CONFIGS) if config != first.config]
    hopper.follow([Visit(i, config, 0, "p0", "w0") for i, config in enumerate(rest)])
    seen = []
    while hopper.running:
        for visit in [*hopper.running.values()]:
            hopper.unit_done(visit)
        seen += [visit.config for visit in hopper.dispatch()]
    assert seen == rest


class Planner:
    """Counts how often it is asked, and returns the plans that it is given."""

    def __init__(self, *plans) -> None:
        self.plans, self.asked = list(plans), []

    def __call__(self, hopper, now_s):
        self.asked.append((now_s, sorted(hopper.workers), dict(hopper.since)))
        return self.plans.pop(0)


def turns(worker, configs, epoch=0):
    return [Visit(i, config, epoch, "p0", worker) for i, config in enumerate(configs)]


def test_a_plan_is_kept_as_long_as_its_workers_are_there():
    planner = Planner()
    plan = [*turns("w0", "ab"), *turns("w1", "cd")]
    hopper = hopper_with(plan, homes={"w0": ("p0",), "w1": ("p0",), "w2": ("p0",)}, reschedule=planner)
    for visit in hopper.dispatch(1.0):
        hopper.unit_done(visit)
    (again, _) = hopper.dispatch(2.0)
    hopper.unit_failed(again)
    assert [visit.unit for visit in hopper.dispatch(3.0)] == [again.unit]
    assert planner.asked == []


def test_failures_at_a_time_make_one_plan():
    planner = Planner(turns("w2", "dcab"), turns("w1", "b"))
    homes = {"w0": ("p0",), "w1": ("p0",), "w2": ("p0",)}
    hopper = hopper_with(turns("w0", "abcd"), homes=homes, reschedule=planner)
    hopper.dispatch(1.0)
    hopper.worker_fails("w0")
    hopper.worker_fails("w1")
    (started,) = hopper.dispatch(2.0)
    assert (started.config, started.worker) == ("d", "w2")
    hopper.dispatch(3.0)
    hopper.worker_fails("w9")
    hopper.dispatch(4.0)
    assert planner.asked == [(2.0, ["w2"], {})]
    hopper.worker_joins("w1", ["p0"])
    assert [visit.unit for visit in hopper.dispatch(5.0)] == [Unit("b", 0, "p0")]
    assert planner.asked[1:] == [(5.0, ["w1", "w2"], {"w2": 2.0})]
    assert hopper.since == {"w2": 2.0, "w1": 5.0}


def test_a_start_without_a_worker_of_the_plan_is_planned_anew():
    planner = Planner(turns("w1", "dcba"), turns("w1", "c"))
    hopper = hopper_with(turns("w0", "abcd"), homes={"w1": ("p0",)}, reschedule=planner)
    (started,) = hopper.dispatch()
    assert started.unit == Unit("d", 0, "p0")
    hopper.worker_joins("w0", ["p0"])
    hopper.dispatch()
    assert [workers for _, workers, _ in planner.asked] == [["w1"], ["w0", "w1"]]


def test_a_plan_that_is_used_up_is_followed_by_another():
    planner = Planner(turns("w0", "ba"), turns("w0", "dc"))
    hopper = hopper_with(homes={"w0": ("p0",)}, reschedule=planner)
    done = []
    for _ in CONFIGS:
        (visit,) = hopper.dispatch()
        hopper.unit_done(visit)
        done.append(visit.config)
    assert done == ["b", "a", "d", "c"]


def test_nothing_is_planned_when_nothing_waits():
    hopper = Hopper(PARTITIONS, reschedule=Planner())
    hopper.worker_joins("w0", ["p0"])
    assert hopper.dispatch() == ()
