from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.errors import BadInputError
from hetctl.perf.rate_extrapolation import (
    gpus_needed,
    largest_profile,
    learned,
    prior_shapes,
    profiled_gpus,
    rate_curve,
    rate_on,
)

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


def scaling(single: float, *, rest: float, latency: float, step: float, last: int = 64) -> dict[int, float]:
    """Return the rates of a network: computation, and shares of its time for what GPUs do not divide."""
    counts = [1 << power for power in range(last.bit_length())]
    return {m: single / (1 / m + rest + latency * math.log2(m) + step * (m > 1)) for m in counts}


SHAPES = {
    "nearly linear": scaling(100.0, rest=0.002, latency=0.0005, step=0.01),
    "bound by latency": scaling(100.0, rest=0.02, latency=0.02, step=0.0),
    "serial part": scaling(100.0, rest=0.08, latency=0.0, step=0.0),
    "slow network": scaling(100.0, rest=0.01, latency=0.01, step=0.3),
    "shared bandwidth": {m: 100 / (1 / m + 0.05 * (m > 1)) for m in (1, 2, 4, 8, 16, 32, 64)},
}
FOREIGN = {
    "ring": {m: 100 / (1 / m + 0.001 * (m - 1)) for m in (1, 2, 4, 8, 16, 32, 64)},
    "ring transfer": {m: 100 / (1 / m + 0.05 * (m - 1) / m) for m in (1, 2, 4, 8, 16, 32, 64)},
    "power law": {m: 100 * m**0.8 for m in (1, 2, 4, 8, 16, 32, 64)},
}
TRUTHS = SHAPES | FOREIGN


def few(shape: str, most: int = 8) -> dict[int, float]:
    return {m: rate for m, rate in TRUTHS[shape].items() if m <= most}


@pytest.mark.parametrize("measured", [(1,), (1, 2), (1, 4), (1, 2, 4, 8)])
def test_predictions_are_off_by_their_spread(measured: tuple[int, ...]) -> None:
    off = []
    for truth in TRUTHS.values():
        curve = rate_curve({m: truth[m] for m in measured}, 64)
        off += [math.log(curve.rates[m] / truth[m]) / curve.spread[m] for m in truth if m not in measured]
    assert 0.5 <= math.sqrt(sum(z**2 for z in off) / len(off)) <= 2


def test_measured_numbers_have_no_spread_and_predicted_ones_grow() -> None:
    curve = rate_curve(few("nearly linear"), 64)
    assert list(curve.spread) == list(range(9, 65))
    assert curve.spread[64] > curve.spread[32] > curve.spread[16] > 0
    assert curve.notes[-1].startswith("predicted above 8 GPUs, within")


def test_more_points_are_surer() -> None:
    known = [rate_curve(few("serial part", most), 64).spread[64] for most in (1, 2, 4, 8)]
    assert known == sorted(known, reverse=True)
    assert known[0] > 3 * known[-1]


def test_members_scale_like_the_others_of_their_ensemble() -> None:
    truth = TRUTHS["slow network"]
    alone = rate_curve({1: 50.0}, 64)
    taught = rate_curve(
        {1: 50.0}, 64, 1, learned([{m: k * rate for m, rate in truth.items()} for k in range(1, 9)])
    )
    wanted = 50 * truth[8] / truth[1]
    assert abs(math.log(taught.rates[8] / wanted)) < abs(math.log(alone.rates[8] / wanted)) / 2
    assert taught.spread[8] < alone.spread[8]
    assert learned([{1: 5.0}, {2: 7.0, 4: math.nan}]) == prior_shapes()


def test_what_more_gpus_cannot_speed_up_is_not_to_be_measured() -> None:
    assert rate_curve({1: 100.0, 2: 120.0, 4: 100.0, 8: 70.0}, 64).to_measure == ()


def test_one_point_is_continued_by_the_usual_scaling() -> None:
    curve = rate_curve({2: 100.0}, 16)
    assert curve.rates[2] == 100
    assert 50 < curve.rates[1] < 70
    assert 150 < curve.rates[4] < 200
    assert 2 not in curve.spread
    assert curve.spread[1] > 0
    assert curve.to_measure == (4, 8, 16)
    assert curve.notes[0] == "predicted below 2 GPUs"


def test_wide_gaps_are_filled_by_the_curve_through_both_ends() -> None:
    curve = rate_curve({1: 100.0, 8: 500.0}, 8)
    assert curve.rates[4] > 100 + 400 * 3 / 7
    assert 0 < curve.spread[4] < rate_curve({1: 100.0}, 8).spread[4]


def test_gaps_are_interpolated_and_measured_rates_kept() -> None:
    curve = rate_curve({1: 100.0, 2: 180.0, 4: 320.0, 8: 512.0}, 8)
    assert (curve.rates[3], curve.rates[5]) == pytest.approx((250.0, 368.0))
    assert curve.useful == curve.rates
    assert curve.notes == ("interpolated between 2 and 4 GPUs", "interpolated between 4 and 8 GPUs")


def test_superlinear_scaling_is_not_continued() -> None:
    assert 380 < rate_curve({1: 100.0, 2: 220.0}, 4).rates[4] < 440


def test_unusable_rates_are_left_out_with_a_note() -> None:
    curve = rate_curve({1: 10.0, 2: 0.0, 3: float("nan")}, 2)
    assert 10 < curve.rates[2] < 20
    assert curve.notes[:2] == ("unusable rate at 2 GPUs left out", "unusable rate at 3 GPUs left out")


@pytest.mark.parametrize("measured", [{}, {1: 0.0}, {1: -3.0, 2: float("inf")}])
def test_a_curve_without_usable_rates_is_refused(measured: dict[int, float]) -> None:
    with pytest.raises(BadInputError, match="above zero"):
        rate_curve(measured, 4)


def test_the_rate_on_a_number_is_measured_or_of_the_curve() -> None:
    assert rate_on(2, {1: 10.0, 2: 18.0}) == 18.0
    assert rate_on(3, {1: 10.0, 2: 18.0}) == rate_curve({1: 10.0, 2: 18.0}, 3).rates[3]
    assert rate_on(3, {1: 0.0}) is None


@settings(deadline=None)
@given(tables, st.integers(1, 64))
def test_rates_are_positive_and_measured_ones_are_kept(measured: dict[int, float], max_gpus: int) -> None:
    curve = rate_curve(measured, max_gpus)
    assert list(curve.rates) == list(range(1, max_gpus + 1))
    last = max(measured)
    for gpus, rate in curve.rates.items():
        assert rate > 0
        assert rate <= gpus * measured[last] / last * (1 + 1e-9) or gpus < last
        assert (gpus in curve.spread) <= (gpus not in measured)
        if gpus in measured:
            assert rate == measured[gpus]
    assert list(curve.useful) == list(range(1, max(curve.useful) + 1))


def test_a_second_gpu_that_slows_a_member_down_tells_little_of_eight() -> None:
    """One of Gavel's curves has 0.85 of one GPU's rate on two, and 1.47 on eight."""
    curve = rate_curve({1: 100.0, 2: 85.0}, 8)
    assert abs(math.log(147 / curve.rates[8])) < 2 * curve.spread[8]
    assert 8 in curve.promising
    assert 2 not in curve.useful


@given(st.dictionaries(st.sampled_from((1, 2, 4)), st.floats(1.0, 1e4), min_size=1))
def test_promising_rates_reach_the_fastest_and_no_measured_one_beyond(points: dict[int, float]) -> None:
    curve = rate_curve(points, 8)
    assert curve.useful.items() <= curve.promising.items()
    assert max(curve.promising) in {max(curve.useful), *curve.spread}
    assert list(curve.promising) == list(range(1, len(curve.promising) + 1))
