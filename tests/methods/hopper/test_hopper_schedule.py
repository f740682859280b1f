"""Unit times, their bound, and violations of a schedule's invariants."""

import numpy as np
import pytest
from hop_rules import broken_by_schedule
from hopping_run import trace_of

from hetctl.methods.hopper.schedule import (
    Hop,
    Schedule,
    UnitTimes,
    in_sequence,
    lower_bound,
    trace_line,
    visits_to_repeat,
)
from hetctl.methods.hopper.state_machine import Hopper
from hetctl.model.errors import BadInputError, InfeasibleError

SHOP = UnitTimes.from_matrix([[2, 3], [4, 1]], configs=("a", "b"), workers=("x", "y"))
EVEN = (Hop(0, 0, 0, 0, 2), Hop(1, 1, 1, 0, 1), Hop(0, 1, 1, 2, 5), Hop(1, 0, 0, 2, 6))


def test_a_matrix_is_an_open_shop():
    assert SHOP.is_open_shop
    assert SHOP.matrix.tolist() == [[2, 3], [4, 1]]
    assert (SHOP.configs, SHOP.partitions, SHOP.workers) == (("a", "b"), ("p0", "p1"), ("x", "y"))
    assert lower_bound(SHOP) == 6


def test_partitions_may_be_on_any_one_worker():
    seconds = np.full((1, 2, 2), np.inf)
    seconds[0, 0, 1], seconds[0, 1, 0] = 5, 7
    units = UnitTimes(("a",), ("p", "q"), ("x", "y"), seconds)
    assert units.is_open_shop
    assert units.homes.tolist() == [1, 0]
    assert units.matrix.tolist() == [[5, 7]]


def test_times_do_not_change():
    times = np.ones((1, 1, 1))
    units = UnitTimes(("a",), ("p",), ("x",), times)
    times[0, 0, 0] = 9
    assert units.seconds[0, 0, 0] == 1
    with pytest.raises(ValueError, match="read-only"):
        units.seconds[0, 0, 0] = 2


def test_a_configuration_is_a_bound_of_its_own():
    assert lower_bound(UnitTimes.from_matrix([[5, 5], [1, 1]])) == 10


def test_with_replicas_the_bound_is_that_of_preemption():
    both = UnitTimes(("a", "b"), ("p",), ("x", "y"), np.array([[[2.0, 2.0]], [[4.0, 4.0]]]))
    assert not both.is_open_shop
    assert lower_bound(both) == pytest.approx(4)
    one = UnitTimes(("a", "b", "c"), ("p",), ("x", "y"), np.full((3, 1, 2), 2.0))
    assert lower_bound(one) == pytest.approx(3)


def test_several_partitions_of_one_worker_are_no_open_shop():
    units = UnitTimes(("a", "b"), ("p", "q"), ("x",), np.ones((2, 2, 1)))
    assert lower_bound(units) == pytest.approx(4)
    with pytest.raises(BadInputError, match="several workers"):
        _ = units.matrix


@pytest.mark.parametrize(
    ("matrix", "rule"),
    [([[1, -2]], "negative"), ([[1, np.nan]], "not a number"), ([], "two dimensions"), ([[]], "at least")],
)
def test_wrong_times_are_refused(matrix, rule):
    with pytest.raises(BadInputError, match=rule):
        UnitTimes.from_matrix(matrix)


def test_wrong_shapes_are_refused():
    with pytest.raises(BadInputError, match=r"\(1, 1, 1\).*\(2, 1, 1\)"):
        UnitTimes(("a", "b"), ("p",), ("x",), np.ones((1, 1, 1)))


def test_a_unit_without_a_worker_is_refused():
    with pytest.raises(InfeasibleError, match="no worker can train b on partition p1"):
        UnitTimes.from_matrix([[1, 1], [1, np.inf]], configs=("a", "b"))


def test_hops_in_sequence_start_as_early_as_they_can():
    schedule = in_sequence(SHOP, [hop[:3] for hop in EVEN])
    assert schedule.hops == EVEN
    assert schedule.makespan_s == 6
    assert schedule.sequence == [(1, 1, 1), (0, 0, 0), (0, 1, 1), (1, 0, 0)]
    assert Schedule(()).makespan_s == 0


@pytest.mark.parametrize(
    ("hops", "broken"),
    [
        (EVEN, []),
        (EVEN[:3], ["completeness: b visits p0 0 times"]),
        ((*EVEN, Hop(1, 0, 0, 6, 10)), ["completeness: b visits p0 2 times"]),
        (
            (Hop(0, 0, 0, 0, 2), Hop(1, 1, 1, 0, 1), Hop(0, 1, 1, 1, 4), Hop(1, 0, 0, 2, 6)),
            ["isolation: a starts at 1 s, before it has ended at 2 s"],
        ),
        (
            (Hop(0, 0, 0, 0, 2), Hop(1, 1, 1, 0, 1), Hop(0, 1, 1, 2, 5), Hop(1, 0, 0, 1, 5)),
            ["exclusive access: x starts at 1 s, before it has ended at 2 s"],
        ),
        (
            (*EVEN[:3], Hop(1, 0, 0, 2, 5)),
            ["no preemption: b takes 4 s on x, not from 2 to 5 s"],
        ),
        (
            (*EVEN[:3], Hop(1, 0, 1, 6, 10)),
            ["no preemption: b takes inf s on y, not from 6 to 10 s"],
        ),
    ],
)
def test_violated_invariants_are_named(hops, broken):
    assert broken_by_schedule(Schedule(hops), SHOP) == broken


def test_a_trace_has_the_visits_that_were_done_in_their_order():
    trace = trace_of(("m0", "m1"), lost=True)
    lines = [trace_line(r.visit, r.start_s, r.end_s, lost=r.lost) for r in trace.records]
    found = visits_to_repeat("".join(lines))
    assert sorted(v.unit for v in found) == sorted(v.unit for v in trace.log)
    assert [v.number for v in found] == list(range(len(trace.log)))
    assert Hopper(["p0", "p1"], plan=found).plan == found
