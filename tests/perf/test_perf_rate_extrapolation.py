from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.errors import BadInputError
from hetctl.perf.rate_extrapolation import gpus_needed, largest_profile, profiled_gpus, rate_curve

rates = st.floats(min_value=1e-3, max_value=1e6)
tables = st.dictionaries(st.integers(1, 40), rates, min_size=1, max_size=8)


def test_profiling_sizes_of_the_paper() -> None:
    assert gpus_needed([21.0, 100.0, 176.0]) == 9
    assert gpus_needed([50.0, 150.0]) == 3
    assert profiled_gpus(4) == 8
    assert largest_profile([21.0, 176.0], 4) == 9
    assert largest_profile([100.0, 110.0], 4) == 8


def test_members_that_could_not_be_profiled_do_not_count() -> None:
    assert gpus_needed([0.0, 20.0, 40.0]) == 2
    assert gpus_needed([]) == 1


def test_equation_5_by_hand() -> None:
    # 2 GPUs a node: M_b = 4. r(4)/4 = 90, r(3)/3 = 100, bracket = 0.9.
    curve, notes = rate_curve({1: 120.0, 2: 220.0, 3: 300.0, 4: 360.0}, 6, 2)
    assert curve == pytest.approx({1: 120, 2: 220, 3: 300, 4: 360, 5: 5 * 90 * 0.9, 6: 6 * 90 * 0.81})
    assert notes == ()


def test_equation_5_is_anchored_at_m_b_even_if_more_was_measured() -> None:
    curve, notes = rate_curve({1: 120.0, 2: 220.0, 3: 300.0, 4: 360.0, 5: 420.0}, 6, 2)
    assert curve[5] == 420.0
    assert curve[6] == pytest.approx(6 * 90 * 0.81)
    assert notes == ()


def test_without_m_b_the_last_two_points_are_the_anchor() -> None:
    curve, notes = rate_curve({1: 100.0, 2: 180.0}, 4, 4)
    assert curve[3] == pytest.approx(3 * 90 * 0.9)
    assert notes == ("Equation 5 from 1 and 2 GPUs, not from M_b",)


def test_gaps_are_interpolated_and_the_last_point_extrapolated() -> None:
    curve, notes = rate_curve({1: 100.0, 2: 180.0, 4: 320.0, 8: 512.0}, 9, 4)
    assert curve[3] == pytest.approx(250.0)
    assert curve[5] == pytest.approx(368.0)
    # Efficiency fell from 80 to 64 a GPU over four GPUs.
    assert curve[9] == pytest.approx(9 * 64 * 0.8**0.25)
    assert notes == (
        "interpolated between 2 and 4 GPUs",
        "interpolated between 4 and 8 GPUs",
        "Equation 5 from 4 and 8 GPUs, not from M_b",
    )


def test_superlinear_scaling_is_not_continued() -> None:
    curve, notes = rate_curve({1: 100.0, 2: 220.0}, 4, 1)
    assert curve[4] == pytest.approx(440.0)
    assert notes == ("proportional above 2 GPUs: superlinear up to 2",)


def test_one_point_is_continued_in_proportion_both_ways() -> None:
    curve, notes = rate_curve({2: 100.0}, 3, 4)
    assert curve == pytest.approx({1: 50.0, 2: 100.0, 3: 150.0})
    assert notes == (
        "proportional below 2 GPUs: no fewer were measured",
        "proportional above 2 GPUs: one point was measured",
    )


def test_unusable_rates_are_left_out_with_a_note() -> None:
    curve, notes = rate_curve({1: 10.0, 2: 0.0, 3: float("nan")}, 2, 4)
    assert curve[2] == pytest.approx(20.0)
    assert notes[:2] == ("unusable rate at 2 GPUs left out", "unusable rate at 3 GPUs left out")


@pytest.mark.parametrize("measured", [{}, {1: 0.0}, {1: -3.0, 2: float("inf")}])
def test_a_curve_without_usable_rates_is_refused(measured: dict[int, float]) -> None:
    with pytest.raises(BadInputError, match="above zero"):
        rate_curve(measured, 4, 4)


def test_a_steep_fall_never_reaches_zero() -> None:
    curve, _ = rate_curve({1: 100.0, 2: 20.0}, 5000, 1)
    assert min(curve.values()) > 0


@settings(deadline=None)
@given(tables, st.integers(1, 64), st.integers(1, 8))
def test_rates_are_positive_and_measured_ones_are_kept(
    measured: dict[int, float], max_gpus: int, per_node: int
) -> None:
    curve, _ = rate_curve(measured, max_gpus, per_node)
    assert list(curve) == list(range(1, max_gpus + 1))
    best_efficiency = max(rate / gpus for gpus, rate in measured.items())
    for gpus, rate in curve.items():
        assert rate > 0
        assert rate <= gpus * best_efficiency * (1 + 1e-9) or min(measured) < gpus < max(measured)
        if gpus in measured:
            assert rate == measured[gpus]
