"""Links fitted to measurements."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.pipeline.stage_costs import Links, fit_inter, fit_scaling

SIZES = st.lists(st.floats(1e3, 1e9), min_size=2, max_size=30, unique=True)


@settings(max_examples=30)
@given(SIZES, st.floats(0, 1e-2), st.floats(1e-11, 1e-8))
def test_a_line_is_found_again(sizes, latency, s_per_byte):
    points = [(size, latency + size * s_per_byte) for size in sizes]
    found = fit_inter(points)
    for size, seconds in points:
        assert found[0] + found[1] * size == pytest.approx(seconds, rel=1e-3, abs=1e-7)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.floats(1e3, 1e9), st.floats(1e-6, 1.0)), min_size=2, max_size=9, unique_by=lambda p: p[0]
    )
)
def test_neither_latency_nor_bandwidth_is_negative(points):
    assert min(fit_inter(points)) >= 0


def test_a_scaling_constant_is_found_again():
    assert fit_scaling(16e9, [(size, size / (16e9 * 0.7)) for size in (1e6, 1e7, 3e8)]) == pytest.approx(0.7)


def test_fitted_links_predict_both_kinds():
    links = Links(10.0, fit_scaling(10.0, [(100, 20)]), *fit_inter([(100, 3), (200, 5)]))
    assert links.seconds(50, same_node=True) == pytest.approx(10)
    assert links.seconds(50, same_node=False) == pytest.approx(2)


def test_nothing_takes_no_time():
    assert Links(1.0, 1.0, 5.0, 1.0).seconds(0, same_node=False) == 0
