"""Plans of training and evaluation visits: what the state machine does with them, and what they cost."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.hopper import SCHEDULERS, SearchOptions
from hetctl.methods.hopper.hop_plans import planned_visits
from hetctl.methods.hopper.schedule import UnitTimes
from hetctl.methods.hopper.simulate import simulate_hops
from hetctl.methods.hopper.state_machine import Hopper
from hetctl.model.hops import Visit
from hetctl.model.plan import HOP_SCHEDULERS

QUICK = SearchOptions(seconds=0.02)


@st.composite
def shops(draw: st.DrawFn) -> tuple[UnitTimes, UnitTimes, dict[str, int]]:
    """Times of training and evaluation, with replicas of some partitions, and the epochs of each."""
    configs, partitions, workers = (draw(st.integers(1, most)) for most in (5, 4, 4))
    has = np.array(
        [[(j % workers == k) or draw(st.booleans()) for k in range(workers)] for j in range(partitions)]
    )
    seeds = np.random.default_rng(draw(st.integers(0, 1000)))
    counts = {"c": configs, "p": partitions, "w": workers}
    names = [tuple(f"{letter}{i}" for i in range(count)) for letter, count in counts.items()]
    train, evaluate = (
        UnitTimes(*names, np.where(has[None], longest * seeds.random((configs, 1, 1)), np.inf))
        for longest in (10.0, 1.0)
    )
    return train, evaluate, {name: draw(st.integers(0, 3)) for name in names[0]}


def epochs_of(epochs):
    return {name: 2 * count for name, count in epochs.items()}


@settings(max_examples=60, deadline=None)
@given(shops())
def test_every_unit_of_every_epoch_is_planned_once(shop):
    train, evaluate, epochs = shop
    plan = planned_visits(train, evaluate, epochs, QUICK)
    assert [visit.number for visit in plan] == list(range(len(plan)))
    assert Counter(visit.unit for visit in plan) == Counter(
        (config, epoch, partition)
        for config, count in epochs.items()
        for epoch in range(2 * count)
        for partition in train.partitions
    )
    last: dict[str, int] = defaultdict(int)
    for visit in plan:
        assert visit.epoch >= last[visit.config]
        last[visit.config] = visit.epoch


@settings(max_examples=60, deadline=None)
@given(shops())
def test_the_state_machine_follows_the_plan(shop):
    """No visit is drawn: each worker and each configuration has its visits in the order of the plan."""
    train, evaluate, epochs = shop
    plan = planned_visits(train, evaluate, epochs, QUICK)
    log = simulate_hops(train, plan=plan, epochs=epochs_of(epochs), evaluate=evaluate).log
    for of in ("worker", "config"):
        assert by(log, of) == by(plan, of)


def by(visits, name):
    found = defaultdict(list)
    for visit in visits:
        found[getattr(visit, name)].append((visit.unit, visit.worker))
    return found


def test_a_hopper_starts_the_first_visits_of_a_plan():
    train = UnitTimes.from_matrix([[2.0, 1.0], [1.0, 2.0]])
    evaluate = UnitTimes.from_matrix([[0.1, 0.1], [0.1, 0.1]])
    plan = planned_visits(train, evaluate, {"c0": 1, "c1": 1}, QUICK)
    assert [visit.epoch for visit in plan] == [0] * 4 + [1] * 4
    hopper = Hopper(train.partitions, plan=plan)
    for j in range(2):
        hopper.worker_joins(f"w{j}", [f"p{j}"])
        hopper.config_joins(f"c{j}")
    assert set(map(place, hopper.dispatch())) <= set(map(place, plan[:2]))


def place(visit: Visit) -> tuple[str, str, str]:
    return visit.config, visit.partition, visit.worker


def test_the_schedulers_are_those_that_users_can_name():
    assert set(SCHEDULERS) == set(HOP_SCHEDULERS)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_all_schedulers_plan_an_open_shop(scheduler):
    train = UnitTimes.from_matrix(np.arange(1.0, 10.0).reshape(3, 3))
    evaluate = UnitTimes.from_matrix(np.full((3, 3), 0.1))
    plan = planned_visits(train, evaluate, dict.fromkeys(train.configs, 2), QUICK, scheduler)
    assert len(plan) == 3 * 3 * 4


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(16, 8), (12, 6)]))
def test_evaluation_hardly_delays_a_dense_plan(seed, sizes):
    """With twice as many configurations as workers, the time is close to that of the busiest worker."""
    configs, workers = sizes
    draw = np.random.default_rng(seed)
    speeds = draw.uniform(1.0, 2.0, (configs, 1)) * np.ones((configs, workers))
    train, evaluate = (UnitTimes.from_matrix(scale * speeds) for scale in (10.0, 1.0))
    epochs = dict.fromkeys(train.configs, 4)
    plan = planned_visits(train, evaluate, epochs, QUICK)
    trace = simulate_hops(train, plan=plan, epochs=epochs_of(epochs), evaluate=evaluate)
    busiest_s = 4 * sum(float(units.matrix.sum(axis=0).max()) for units in (train, evaluate))
    assert trace.makespan_s <= 1.06 * busiest_s
