"""Means and intervals over seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.seed_groups import QUANTILES, Spread, groups_of, paired, spread_of

values = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40)


@given(values)
def test_the_interval_is_that_of_students_t(found):
    from scipy import stats

    spread = spread_of(found)
    assert spread is not None
    error = np.std(found, ddof=1) / len(found) ** 0.5
    # Beyond the table the normal quantile is a little too small.
    rel = 1e-3 if len(found) - 2 < len(QUANTILES) else 0.05
    assert spread.half_width == pytest.approx(stats.t.ppf(0.975, len(found) - 1) * error, rel=rel, abs=1e-9)
    assert spread.deviation == pytest.approx(np.std(found, ddof=1), abs=1e-9)


def test_one_value_has_no_interval_and_none_no_mean():
    assert spread_of([0.5]) == Spread(1, 0.5, None, None)
    assert spread_of([]) is None


@given(values, st.floats(-10, 10))
def test_pairs_compare_each_seed_with_itself(found, shift):
    """A difference that all seeds share is seen, however far the seeds are apart."""
    first = {f"a-{number}": value for number, value in enumerate(found)}
    second = {name: value + shift for name, value in first.items()}
    (pair,) = paired("a", [*first, "a-none"], "loss", [("one", first), ("two", second)])
    assert pair.difference.count == len(found)
    assert pair.difference.mean == pytest.approx(shift, abs=1e-9)
    assert pair.difference.half_width == pytest.approx(0, abs=1e-9)


def test_members_without_a_group_are_in_none():
    assert groups_of([("a", "a"), ("b", ""), ("a-seed-1", "a")]) == {"a": ["a", "a-seed-1"]}
