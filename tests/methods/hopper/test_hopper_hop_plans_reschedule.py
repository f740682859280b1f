"""New plans of the residual problem: complete, and valid however long a worker is absent."""

from __future__ import annotations

import math
from collections import Counter
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.hopper import hop_plans
from hetctl.methods.hopper.hop_plans import Rescheduler
from hetctl.methods.hopper.list_schedule import Residual, dense
from hetctl.methods.hopper.schedule import SearchOptions, UnitTimes
from hetctl.methods.hopper.state_machine import Hopper
from hetctl.model.hops import Visit

ONCE = SearchOptions(seconds=0)
"""Only the first schedule, so that results are the same on any machine."""


def state_of(units: UnitTimes, away=(), running=(), log=(), epochs=None, since=None) -> SimpleNamespace:
    has = np.isfinite(units.seconds).any(axis=0)
    return SimpleNamespace(
        partitions=units.partitions,
        workers={
            worker: tuple(name for j, name in enumerate(units.partitions) if has[j, k])
            for k, worker in enumerate(units.workers)
            if worker not in away
        },
        configs=epochs or dict.fromkeys(units.configs, 0),
        running={visit.worker: visit for visit in running},
        log=tuple(log),
        since=since or {visit.worker: 0.0 for visit in running},
    )


def planned(units: UnitTimes, state, epochs: int = 1, now_s: float = 0.0) -> tuple[Visit, ...]:
    return Rescheduler(units, dict.fromkeys(units.configs, epochs), ONCE)(state, now_s)


def stops(visits, of="config"):
    """Return (epoch, partition, worker) of each configuration, or (config, epoch) of each worker."""
    found: dict[str, list[tuple[object, ...]]] = {}
    for v in visits:
        row = (v.epoch, v.partition, v.worker) if of == "config" else (v.config, v.epoch)
        found.setdefault(getattr(v, of), []).append(row)
    return found


COPIED = UnitTimes(
    ("a", "b"),
    ("p", "q"),
    ("w0", "w1"),
    np.array([[[4, 4], [math.inf, 2]], [[4, 4], [math.inf, 2]]], dtype=float),
)
"""Only w1 has q."""


def test_the_residual_has_units_neither_done_nor_running():
    units = UnitTimes.from_matrix([[10, 20], [30, 40]], configs=("a", "b"))
    log = [Visit(i, "b", 0, p, w) for i, (p, w) in enumerate([("p0", "w0"), ("p1", "w1")])]
    log += [Visit(2, "b", 1, "p1", "w1")]
    running = [Visit(3, "a", 0, "p1", "w1")]
    state = state_of(units, ["w0"], running, log, {"a": 0, "b": 1}, since={"w1": 100.0})
    made = Rescheduler(units, {"a": 3, "b": 2}, ONCE)
    residual = made.residual(state, 115.0)
    assert residual.waiting.tolist() == [[True, False], [True, False]]
    assert residual.epochs.tolist() == [2, 0]
    assert residual.running == ((5.0, 1, 0),)
    assert residual.absent == {0}
    overdue = made.residual(state, 500.0)
    assert overdue.running == ((0.0, 1, 0),)


def test_copies_take_what_a_lost_worker_had():
    visits = planned(COPIED, state_of(COPIED, away=["w0"]))
    assert Counter(visit.unit for visit in visits) == Counter((c, 0, p) for c in "ab" for p in "pq")
    assert {visit.worker for visit in visits} == {"w1"}


def test_units_that_need_a_lost_worker_are_left_out():
    """Both may visit p, which w0 has; q and the second epoch need w1."""
    visits = planned(COPIED, state_of(COPIED, away=["w1"]), epochs=2)
    assert stops(visits) == {"a": [(0, "p", "w0")], "b": [(0, "p", "w0")]}


def test_running_units_count_in_a_new_plan():
    """A is at w1 for long, so w0 has to begin with b, although more is left of a."""
    units = UnitTimes.from_matrix([[10, 90], [10, 10]], configs=("a", "b"))
    running = [Visit(0, "a", 0, "p1", "w1")]
    assert stops(planned(units, state_of(units, running=running)), "worker") == {
        "w0": [("b", 0), ("a", 0)],
        "w1": [("b", 0)],
    }
    nearly_done = planned(units, state_of(units, running=running), now_s=89.0)
    assert nearly_done[0].unit == ("b", 0, "p0")
    assert nearly_done[1].unit == ("a", 0, "p0"), "it is there before b has left w0 for w1"


def test_a_configuration_between_two_epochs_begins_the_next():
    units = UnitTimes.from_matrix([[1.0, 2.0]], configs=("a",))
    log = [Visit(i, "a", 0, f"p{i}", f"w{i}") for i in range(2)]
    visits = planned(units, state_of(units, log=log), epochs=2)
    assert sorted(visit.unit for visit in visits) == [("a", 1, "p0"), ("a", 1, "p1")]


def test_there_is_a_horizon(monkeypatch):
    monkeypatch.setattr(hop_plans, "MOST_UNITS", 13)
    assert len(planned(COPIED, state_of(COPIED), epochs=10)) == 12
    monkeypatch.setattr(hop_plans, "MOST_UNITS", 1)
    assert len(planned(COPIED, state_of(COPIED), epochs=10)) == 4, "an epoch at least"


@pytest.mark.parametrize(("seconds", "schedules"), [(0.0, 1), (0.1, 2), (60.0, 4)])
def test_workers_do_not_wait_long_for_a_plan(monkeypatch, seconds, schedules):
    """A clock that ticks every 50 ms, once before the first schedule and once before each other one."""
    ticks = (i * 0.05 for i in count())
    made = []
    monkeypatch.setattr(hop_plans, "dense", lambda *given: made.append(given) or dense(*given))
    options = SearchOptions(seconds=seconds, clock=lambda: next(ticks))
    Rescheduler(COPIED, {"a": 1, "b": 1}, options)(state_of(COPIED), 0.0)
    assert len(made) == schedules


@st.composite
def residuals(draw: st.DrawFn) -> tuple[UnitTimes, Hopper, int]:
    """Return a run at any time: some workers away, some units done, some running."""
    configs, workers, epochs = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    seconds = np.full((configs, workers, workers), np.inf)
    for j in range(workers):
        for k in draw(st.sets(st.integers(0, workers - 1))) | {j}:
            seconds[:, j, k] = draw(st.lists(st.integers(0, 9), min_size=configs, max_size=configs))
    names = [tuple(f"{letter}{i}" for i in range(n)) for letter, n in zip("cpw", seconds.shape, strict=True)]
    units = UnitTimes(names[0], names[1], names[2], seconds)
    hopper = Hopper(units.partitions, seed=draw(st.integers(0, 9)))
    for worker, partitions in state_of(units).workers.items():
        hopper.worker_joins(worker, partitions)
    for config in units.configs:
        hopper.config_joins(config)
    for _ in range(draw(st.integers(0, configs * workers))):
        hopper.dispatch()
        if running := [*hopper.running.values()]:
            hopper.unit_done(running[0])
    hopper.dispatch()
    for worker in draw(st.sets(st.sampled_from(units.workers))):
        hopper.worker_fails(worker)
    return units, hopper, epochs


@settings(deadline=None)
@given(residuals())
def test_a_plan_has_each_unit_once_and_in_the_order_of_epochs(case):
    units, state, epochs = case
    visits = planned(units, state, epochs)
    begun = {visit.unit for visit in (*state.log, *state.running.values())}
    every = {(c, e, p) for c in units.configs for e in range(epochs) for p in units.partitions}
    found = [visit.unit for visit in visits]
    assert len(found) == len(set(found))
    assert not begun.intersection(found)
    reachable = set().union(*state.workers.values())
    if reachable == set(units.partitions):
        assert set(found) == every - begun
    for visit in visits:
        assert visit.partition in state.workers[visit.worker]
    for config, row in stops(visits).items():
        assert [epoch for epoch, *_ in row] == sorted(epoch for epoch, *_ in row), config
        last = row[-1][0]
        before = {unit for unit in every if unit[0] == config and unit[1] < last}
        assert before <= begun.union(found), "an epoch begins when the last one has ended"


@settings(deadline=None)
@given(residuals())
def test_a_schedule_of_what_is_left_keeps_the_invariants(case):
    units, state, epochs = case
    residual = Rescheduler(units, dict.fromkeys(units.configs, epochs), ONCE).residual(state, 0.0)
    hops = dense(residual).hops
    assert len(hops) == residual.waiting.sum() + residual.epochs.sum() * len(units.partitions)
    free_workers = {worker: end_s for end_s, worker, _ in residual.running}
    free_configs = {config: end_s for end_s, _, config in residual.running}
    for hop in hops:
        assert hop.start_s >= max(free_workers.get(hop.worker, 0.0), free_configs.get(hop.config, 0.0))
        assert hop.end_s - hop.start_s == units.seconds[hop.config, hop.partition, hop.worker]
        free_workers[hop.worker] = free_configs[hop.config] = hop.end_s


def test_absent_workers_come_last():
    """They are taken to return when nothing else can be done: after 7 s of a and b at w0."""
    units = UnitTimes.from_matrix([[3, 5], [4, 6]])
    whole = Residual.whole(units)
    away = Residual(units, whole.waiting, whole.epochs, absent=frozenset({1}))
    hops = dense(away).hops
    assert [(hop.config, hop.worker, hop.start_s) for hop in hops] == [
        (1, 0, 0.0),
        (0, 0, 4.0),
        (1, 1, 7.0),
        (0, 1, 13.0),
    ]
