import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.balance.step_time import Lines, TimeCurve, balanced, fluid_time, whole_batches

LAUNCH = st.floats(0, 5)
PER_SAMPLE = st.floats(1e-4, 1)


def test_lines_there_and_back():
    lines = Lines(np.array([0.5, 0.0]), np.array([0.1, 0.2]))
    assert lines.seconds(np.array([5.0, 5.0])) == pytest.approx([1.0, 1.0])
    assert lines.batches(1.0) == pytest.approx([5.0, 5.0])


def test_the_fluid_time_of_lines():
    lines = Lines(np.array([0.5, 0.0]), np.array([0.1, 0.2]))
    no_caps = np.full(2, np.inf)
    assert fluid_time(lines, 10, no_caps) == pytest.approx(1.0)
    assert whole_batches(lines, 10, no_caps).tolist() == [5, 5]


@given(st.lists(st.tuples(LAUNCH, PER_SAMPLE), min_size=1, max_size=6), st.integers(0, 200))
def test_lines_are_shared_out_as_well_as_curves(workers, more):
    total = len(workers) + more
    lines = Lines(*np.array(workers).T)
    shares = whole_batches(lines, total, np.full(len(workers), np.inf))
    curves = [TimeCurve(((1, a + b), (2, a + 2 * b))) for a, b in workers]
    others = np.array(balanced(curves, total), dtype=float)
    assert shares.sum() == total
    assert shares.min() >= 1
    assert lines.seconds(shares.astype(float)).max() == pytest.approx(lines.seconds(others).max(), rel=1e-6)
