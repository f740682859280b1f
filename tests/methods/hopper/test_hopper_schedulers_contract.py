"""Every scheduler keeps the invariants, on open shops and with replicas, and none beats the bound."""

import itertools
import random

import numpy as np
import pytest
from hop_rules import broken_by_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.hopper import SCHEDULERS, SearchOptions
from hetctl.methods.hopper.list_schedule import Residual, dense, randomized
from hetctl.methods.hopper.portfolio import on_single_workers, refine
from hetctl.methods.hopper.schedule import UnitTimes, in_sequence, lower_bound

SOON = SearchOptions(seconds=0.05)
FAST, SEARCHING = ("randomized", "approximate"), ("milp", "best")


@st.composite
def open_shops(draw, most=5):
    configs, workers = draw(st.integers(1, most)), draw(st.integers(1, most))
    times = st.one_of(st.integers(0, 9).map(float), st.floats(0.01, 100))
    return UnitTimes.from_matrix(
        draw(
            st.lists(st.lists(times, min_size=workers, max_size=workers), min_size=configs, max_size=configs)
        )
    )


@st.composite
def replicated(draw, most=4):
    configs, partitions, workers = (draw(st.integers(1, most)) for _ in range(3))
    draws = random.Random(draw(st.integers(0, 10**6)))
    seconds = np.full((configs, partitions, workers), np.inf)
    for partition in range(partitions):
        for worker in draws.sample(range(workers), draws.randint(1, workers)):
            seconds[:, partition, worker] = [draws.choice([1, 2, 3.7, 20]) for _ in range(configs)]
    names = [tuple(f"{kind}{i}" for i in range(n)) for kind, n in zip("cpw", seconds.shape, strict=True)]
    return UnitTimes(*names, seconds)


def check(name, units):
    schedule = SCHEDULERS[name](units, SOON)
    assert broken_by_schedule(schedule, units) == []
    assert schedule.makespan_s >= lower_bound(units) * (1 - 1e-6)
    return schedule


@pytest.mark.parametrize("name", FAST)
@settings(max_examples=60, deadline=None)
@given(units=open_shops(most=7))
def test_schedules_of_open_shops_obey_the_rules_of_hops(name, units):
    check(name, units)


@pytest.mark.parametrize("name", SEARCHING)
@settings(max_examples=12, deadline=None)
@given(units=open_shops(most=4))
def test_open_shops_are_searched(name, units):
    first = {"milp": randomized(units, SOON), "best": dense(Residual.whole(units))}[name]
    assert check(name, units).makespan_s <= first.makespan_s


@settings(max_examples=60, deadline=None)
@given(units=replicated(most=6))
def test_random_schedules_with_replicas_obey_the_rules_of_hops(units):
    check("randomized", units)


@pytest.mark.parametrize("name", SEARCHING)
@settings(max_examples=12, deadline=None)
@given(units=replicated())
def test_searches_with_replicas_obey_the_rules_of_hops(name, units):
    check(name, units)


@pytest.mark.parametrize("name", FAST)
def test_the_same_question_has_the_same_answer(name):
    units = random_shop(8, 5)
    assert SCHEDULERS[name](units, SOON) == SCHEDULERS[name](units, SOON)


def test_random_schedules_differ_by_their_seeds():
    units = random_shop(8, 5)
    assert len({randomized(units, SearchOptions(seed=seed)) for seed in range(10)}) == 10


@settings(max_examples=40, deadline=None)
@given(units=open_shops(most=7), noise=st.sampled_from([0.0, 0.3]))
def test_no_worker_waits_in_a_dense_schedule(units, noise):
    schedule = dense(Residual.whole(units), noise, seed=1)
    assert broken_by_schedule(schedule, units) == []
    for hop in schedule.hops:
        before = [h.end_s for h in schedule.hops if h.end_s <= hop.start_s and hop[:3] != h[:3]]
        freed = [h.end_s for h in schedule.hops if (h.config == hop.config) != (h.worker == hop.worker)]
        assert hop.start_s == 0 or hop.start_s in before
        assert hop.start_s == 0 or hop.start_s in freed


def random_shop(configs, workers, seed=0):
    draw = random.Random(seed)
    return UnitTimes.from_matrix([[draw.randint(1, 99) for _ in range(workers)] for _ in range(configs)])


def least_makespan(units):
    """Try every order of all units."""
    cells = [(i, j, int(units.homes[j])) for i, j in np.ndindex(*units.matrix.shape)]
    return min(in_sequence(units, order).makespan_s for order in itertools.permutations(cells))


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("name", SEARCHING)
def test_searches_come_to_the_optimum_of_small_shops(name, shape):
    for seed in range(3):
        units = random_shop(*shape, seed)
        schedule = SCHEDULERS[name](units, SearchOptions(seconds=5))
        assert schedule.makespan_s == pytest.approx(least_makespan(units))


def test_searches_spread_visits_over_the_replicas():
    seconds = np.full((4, 2, 3), 6.0)
    seconds[:, 0, 2] = np.inf
    units = UnitTimes(("a", "b", "c", "d"), ("p", "q"), ("x", "y", "z"), seconds)
    assert lower_bound(units) == pytest.approx(16)
    for name in SEARCHING:
        assert SCHEDULERS[name](units, SearchOptions(seconds=5)).makespan_s == 18


@settings(max_examples=40, deadline=None)
@given(units=replicated(most=6), seed=st.integers(0, 9))
def test_units_are_settled_on_a_worker_that_has_them(units, seed):
    there = np.isfinite(on_single_workers(units, seed).seconds)
    assert (there.sum(axis=2) == 1).all()
    assert (there <= np.isfinite(units.seconds)).all()


def test_settled_units_keep_workers_equally_busy():
    units = UnitTimes(tuple("abcdefgh"), ("p", "q"), ("x", "y"), np.full((8, 2, 2), 3.0))
    busy = np.nan_to_num(on_single_workers(units, 0).seconds, posinf=0).sum(axis=(0, 1))
    assert busy.tolist() == [24, 24]


def test_units_stay_unsettled_where_workers_cannot_train_all():
    seconds = np.array([[[1, np.inf]], [[np.inf, 1]]])
    units = UnitTimes(("a", "b"), ("p",), ("x", "y"), seconds)
    assert on_single_workers(units, 0) is units
    assert SCHEDULERS["best"](units, SOON).makespan_s == 1


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_the_solver_never_returns_a_worse_schedule(scale):
    units = UnitTimes.from_matrix(random_shop(5, 5).matrix * scale)
    first = randomized(units, SOON)
    found = refine(units, first, lower_bound(units), SearchOptions(seconds=0.3))
    assert broken_by_schedule(found, units) == []
    assert found.makespan_s <= first.makespan_s


@pytest.mark.parametrize("name", SEARCHING)
def test_too_large_a_problem_is_not_searched_for_long(name):
    units = random_shop(60, 12)
    schedule = SCHEDULERS[name](units, SOON)
    assert broken_by_schedule(schedule, units) == []


@pytest.mark.parametrize("name", SEARCHING)
def test_without_time_there_is_a_schedule_still(name):
    units = random_shop(4, 4)
    assert broken_by_schedule(SCHEDULERS[name](units, SearchOptions(seconds=0)), units) == []
