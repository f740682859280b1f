import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.balance.step_time import TimeCurve, balance_time, balanced
from hetctl.model.errors import BadInputError, InfeasibleError

NEAR = 1e-9


def curves(max_cap=None):
    points = st.lists(
        st.tuples(st.integers(1, 40), st.floats(0.01, 10)), min_size=1, max_size=4, unique_by=lambda p: p[0]
    )
    caps = st.none() | st.integers(1, max_cap) if max_cap else st.none()
    return st.builds(lambda points, cap: TimeCurve(tuple(points), cap), points, caps)


def test_one_point_means_in_proportion():
    curve = TimeCurve(((32, 2.0),))
    assert curve.seconds(8) == 0.5
    assert curve.seconds(64) == 4.0
    assert curve.batch(1.0) == 16


def test_two_points_tell_the_launch_overhead():
    curve = TimeCurve(((8, 1.0), (16, 1.5)))
    assert curve.seconds(0) == 0.5
    assert curve.seconds(4) == 0.75
    assert curve.seconds(24) == 2.0
    assert curve.batch(0.4) == 0


def test_a_launch_overhead_is_never_negative():
    curve = TimeCurve(((8, 1.0), (16, 3.0)))
    assert curve.seconds(0) == 0
    assert curve.seconds(4) == 0.5


def test_below_saturation_time_is_constant():
    curve = TimeCurve(((2, 0.5), (16, 0.5), (32, 1.0)))
    assert curve.seconds(1) == curve.seconds(16) == 0.5
    assert curve.batch(0.5) == 16
    assert curve.batch(0.49) == 0


def test_after_a_flat_end_time_rises_in_proportion():
    curve = TimeCurve(((2, 0.5), (16, 0.5)))
    assert curve.seconds(32) == 1.0
    assert curve.batch(0.5) == 16


def test_a_point_below_an_earlier_one_is_raised_to_it():
    assert TimeCurve(((32, 0.9), (16, 1.0))).seconds(32) == 1.0


def test_no_batch_is_above_the_cap():
    assert TimeCurve(((1, 0.1),), cap=20).batch(100.0) == 20


@pytest.mark.parametrize(
    "points",
    [(), ((8, 1.0), (8, 2.0)), ((0, 1.0),), ((8, 0.0),), ((8, -1.0),), ((8, math.nan),), ((math.inf, 1.0),)],
)
def test_points_that_cannot_be_are_refused(points):
    with pytest.raises(BadInputError):
        TimeCurve(points)


def test_a_cap_without_room_is_refused():
    with pytest.raises(BadInputError, match="at least 1"):
        TimeCurve(((8, 1.0),), cap=0)


@given(curves(), st.floats(0, 100), st.floats(0, 100))
def test_a_larger_batch_takes_no_less_time(curve, one, other):
    assert curve.seconds(min(one, other)) <= curve.seconds(max(one, other)) + NEAR


@given(curves(), st.floats(0, 100))
def test_a_batch_within_a_time_is_the_largest(curve, batch):
    assert curve.batch(curve.seconds(batch) * (1 + NEAR)) >= batch * (1 - NEAR) - NEAR
    seconds = curve.seconds(batch) + 1.0
    assert curve.seconds(curve.batch(seconds)) <= seconds * (1 + NEAR)


def test_a_worker_of_triple_speed_gets_the_triple_batch():
    slow, fast = TimeCurve(((1, 0.3),)), TimeCurve(((1, 0.1),))
    assert balance_time([slow, fast], 8) == pytest.approx(0.6)
    assert balanced([slow, fast], 8) == (2, 6)


def test_the_slowest_worker_with_one_sample_sets_the_limit():
    lost, others = TimeCurve(((1, 9.0),)), [TimeCurve(((1, 0.1),))] * 2
    assert balance_time([lost, *others], 21) == pytest.approx(9.0)
    assert balanced([lost, *others], 21) == (1, 10, 10)


def test_a_full_worker_leaves_the_rest_to_others():
    curves = [TimeCurve(((1, 0.1),), cap=4), TimeCurve(((1, 0.1),))]
    assert balanced(curves, 20) == (4, 16)
    assert balance_time(curves, 20) == pytest.approx(1.6)


def test_too_small_a_batch_is_refused():
    with pytest.raises(BadInputError, match="too small for 3 workers"):
        balance_time([TimeCurve(((1, 0.1),))] * 3, 2)


def test_too_little_memory_is_infeasible():
    with pytest.raises(InfeasibleError, match="hold 8 in all"):
        balanced([TimeCurve(((1, 0.1),), cap=4)] * 2, 9)


@given(st.lists(curves(max_cap=12), min_size=1, max_size=3), st.integers(0, 12))
def test_balanced_equals_brute_force(workers, more):
    total = len(workers) + more
    room = [range(1, min(total, curve.cap or total) + 1) for curve in workers]
    splits = [split for split in itertools.product(*room) if sum(split) == total]
    if not splits:
        with pytest.raises(InfeasibleError):
            balanced(workers, total)
        return

    def longest(split):
        return max(curve.seconds(batch) for curve, batch in zip(workers, split, strict=True))

    found = balanced(workers, total)
    assert found in splits
    assert longest(found) <= min(map(longest, splits)) * (1 + NEAR)
    assert balance_time(workers, total) <= longest(found) * (1 + NEAR)


@given(st.lists(curves(max_cap=500), min_size=1, max_size=8), st.integers(0, 1000))
def test_the_balance_time_is_the_least_that_is_enough(workers, more):
    total = len(workers) + more
    if sum(curve.cap or total for curve in workers) < total:
        return
    seconds = balance_time(workers, total)

    def done(within):
        return sum(max(curve.batch(within), 1) for curve in workers)

    assert done(seconds * (1 + NEAR)) >= total - NEAR * total
    longest_single = max(curve.seconds(1) for curve in workers)
    assert seconds == pytest.approx(longest_single) or done(seconds * (1 - NEAR)) < total
