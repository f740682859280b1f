from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.errors import BadInputError
from hetctl.perf.rate_extrapolation import (
    ERROR_PER_DOUBLING,
    fit_speed,
    gpus_needed,
    largest_profile,
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


def errors(shape: str, gpus: int) -> float:
    """Return how many standard errors a prediction from 1 to 8 GPUs is off."""
    curve = rate_curve(few(shape), gpus)
    return abs(math.log(curve.rates[gpus] / TRUTHS[shape][gpus])) / math.log1p(curve.spread(gpus))


@pytest.mark.parametrize("shape", TRUTHS)
def test_predictions_from_few_gpus_are_within_their_spread(shape: str) -> None:
    if shape in SHAPES:
        assert max(errors(shape, gpus) for gpus in (16, 32, 64)) <= 1
    else:
        # A ring's latency, in proportion to the GPUs, cannot be told from another on few of them.
        assert errors(shape, 16) <= 2


@pytest.mark.parametrize("shape", SHAPES)
def test_no_more_gpus_are_useful_than_the_truth_says(shape: str) -> None:
    truth, useful = SHAPES[shape], rate_curve(few(shape), 64).useful
    assert max(useful) <= max(truth, key=lambda m: truth[m])
    assert truth[64] < 1.5 * truth[8] or max(useful) >= 16


def test_gains_within_the_error_of_predictions_are_not_useful() -> None:
    # From 8 to 64 GPUs it gains 6 % in all.
    flat = rate_curve(scaling(100.0, rest=0.9, latency=0.0, step=0.0, last=8), 64)
    assert flat.rates[64] > flat.rates[8]
    assert max(flat.useful) == 8
    assert flat.unsure == {m: flat.rates[m] for m in range(9, 65)}
    assert flat.to_measure == (16, 32, 64)
    assert "measure on 16 GPUs first" in flat.notes


def test_measured_numbers_have_no_spread_and_predicted_ones_grow() -> None:
    curve = rate_curve(few("nearly linear"), 64)
    assert [curve.spread(gpus) for gpus in (1, 5, 8)] == [0.0] * 3
    assert curve.spread(16) == pytest.approx(math.exp(ERROR_PER_DOUBLING) - 1)
    assert curve.spread(64) > curve.spread(32) > curve.spread(16)
    assert "predicted above 8 GPUs, within 11% for each doubling" in curve.notes


def test_a_curve_that_broke_before_is_less_sure() -> None:
    broken = rate_curve({1: 100.0, 2: 190.0, 4: 360.0, 8: 450.0}, 16)
    assert broken.error > math.log(1.2)


def test_what_more_gpus_cannot_speed_up_is_not_to_be_measured() -> None:
    assert rate_curve({1: 100.0, 2: 150.0, 4: 160.0, 8: 150.0}, 64).to_measure == ()


def test_one_point_says_nothing_of_more_gpus() -> None:
    curve = rate_curve({2: 100.0}, 16)
    assert curve.rates == pytest.approx({m: 50.0 * m for m in range(1, 17)})
    assert list(curve.useful) == [1, 2]
    assert curve.to_measure == (4, 8, 16)
    assert curve.notes == (
        "proportional below 2 GPUs: no fewer were measured",
        "proportional above 2 GPUs: one point was measured",
        "measure on 4 GPUs first",
    )


def test_gaps_are_interpolated_and_measured_rates_kept() -> None:
    curve = rate_curve({1: 100.0, 2: 180.0, 4: 320.0, 8: 512.0}, 8)
    assert (curve.rates[3], curve.rates[5]) == pytest.approx((250.0, 368.0))
    assert curve.useful == curve.rates
    assert curve.notes == ("interpolated between 2 and 4 GPUs", "interpolated between 4 and 8 GPUs")


def test_superlinear_scaling_is_not_continued() -> None:
    assert rate_curve({1: 100.0, 2: 220.0}, 4).rates[4] == pytest.approx(440.0)


def test_unusable_rates_are_left_out_with_a_note() -> None:
    curve = rate_curve({1: 10.0, 2: 0.0, 3: float("nan")}, 2)
    assert curve.rates[2] == pytest.approx(20.0)
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
    best_efficiency = max(rate / gpus for gpus, rate in measured.items())
    for gpus, rate in curve.rates.items():
        assert rate > 0
        assert rate <= gpus * best_efficiency * (1 + 1e-9) or min(measured) < gpus < max(measured)
        if gpus in measured:
            assert rate == measured[gpus]
    assert list(curve.useful) == list(range(1, max(curve.useful) + 1))
    assert {**curve.useful, **curve.unsure} == curve.rates


@dataclass(frozen=True)
class Cost:
    """Cost of one minibatch.

    Parameters
    ----------
    samples : float
        Samples of the minibatch on each GPU, m in the paper.
    compute_s : float
        Forward and backward time per sample: T_forward + T_back.
    bytes : float
        Size of the gradients in bytes, n in the paper.
    message_s, byte_s, reduce_s : float
        Seconds of latency per message, transfer per byte, and reduction per byte: alpha, beta and gamma.
    """

    samples: float
    compute_s: float
    bytes: float
    message_s: float
    byte_s: float
    reduce_s: float


def doubling_halving_s(cost: Cost, gpus: int) -> float:
    """Return the seconds of a minibatch with doubling-halving, for powers of two (Equation 3)."""
    if gpus == 1:
        return cost.samples * cost.compute_s
    latency_s = 4 * math.log2(gpus) * cost.message_s
    return cost.samples * cost.compute_s + latency_s + cost.bytes * (4 * cost.byte_s + 2.5 * cost.reduce_s)


def rates_of(counts: tuple[int, ...], compute_s: float = 0.003) -> dict[int, float]:
    """Samples/s where the global batch of 128 stays as it is: 128 / w samples on each of w GPUs."""
    return {
        gpus: 128 / doubling_halving_s(Cost(128 / gpus, compute_s, 1e7, 2e-3, 1e-9, 5e-10), gpus)
        for gpus in counts
    }


def test_equation_3_by_hand() -> None:
    cost = Cost(samples=2, compute_s=1.0, bytes=8.0, message_s=10.0, byte_s=0.5, reduce_s=0.25)
    assert doubling_halving_s(cost, 4) == 2 + 4 * 2 * 10 + 4 * 8 * 0.5 + 2.5 * 8 * 0.25


@pytest.mark.parametrize("compute_s", [0.0003, 0.003, 0.03])
def test_a_fit_foretells_the_rates_of_its_own_algorithm(compute_s: float) -> None:
    measured = rates_of((1, 2, 4, 8), compute_s)
    model = fit_speed(measured)
    for gpus, rate in {**measured, **rates_of((16, 32, 64), compute_s)}.items():
        assert model(gpus) == pytest.approx(rate, rel=1e-6)
