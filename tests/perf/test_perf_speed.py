from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.core.errors import BadInputError
from hetctl.perf.speed import (
    DEFAULT_MODEL,
    STEP_SECONDS,
    TERMS,
    Speed,
    StepCosts,
    best_model,
    fit_speed,
    fitted_rates,
)

COSTS = StepCosts(
    minibatch=128,
    forward_s=1e-3,
    back_s=2e-3,
    model_bytes=4e6,
    latency_s=1e-3,
    transfer_s=1e-8,
    reduce_s=1e-9,
)


def rates_of(algorithm: str, *gpus: int) -> dict[int, float]:
    return {w: w * COSTS.minibatch / STEP_SECONDS[algorithm](COSTS, w) for w in gpus}


@pytest.mark.parametrize(
    ("algorithm", "gpus", "seconds"),
    [
        ("ring", 4, 0.384 + 12e-3 + 0.75 * 4e6 * (4e-8 + 2e-9)),
        ("doubling-halving", 8, 0.384 + 12e-3 + 4e6 * (4e-8 + 2.5e-9)),
        ("binary-blocks", 6, 0.384 + 17e-3 + 4e6 * (7e-8 + 3e-9)),
    ],
)
def test_equations_2_to_4_by_hand(algorithm: str, gpus: int, seconds: float) -> None:
    assert STEP_SECONDS[algorithm](COSTS, gpus) == pytest.approx(seconds)


@pytest.mark.parametrize("algorithm", STEP_SECONDS)
def test_one_gpu_exchanges_nothing(algorithm: str) -> None:
    assert STEP_SECONDS[algorithm](COSTS, 1) == pytest.approx(0.384)


def test_a_ring_is_slow_where_messages_are() -> None:
    slow = replace(COSTS, latency_s=0.1)
    assert STEP_SECONDS["ring"](slow, 64) > STEP_SECONDS["doubling-halving"](slow, 64)


@pytest.mark.parametrize("model", STEP_SECONDS)
def test_rates_of_an_algorithm_are_found_again_by_its_model(model: str) -> None:
    speed = fit_speed(rates_of(model, 1, 2, 3, 4, 8), model)
    expected = rates_of(model, 16, 24, 64)
    assert {w: speed.rate(w) for w in expected} == pytest.approx(expected, rel=1e-6)


def test_equation_5_is_found_again() -> None:
    true = Speed("equation-5", (0.01, 0.0005, 1e-5, 2e-4))
    speed = fit_speed({w: true.rate(w) for w in (1, 2, 3, 4, 6, 8)})
    assert speed.rate(64) == pytest.approx(true.rate(64), rel=1e-6)
    assert speed.thetas[2] == pytest.approx(1e-5, rel=1e-6)


def test_thetas_are_those_of_least_squares_over_all_that_are_not_negative() -> None:
    measured = {1: 100.0, 2: 190.0, 4: 300.0, 8: 590.0}
    found = fit_speed(measured, "ring")

    def squares(speed: Speed) -> float:
        return sum((rate / speed.rate(w) - 1) ** 2 for w, rate in measured.items())

    for index, theta in enumerate(found.thetas):
        for nearby in (theta * 1.001, theta * 0.999, theta + 1e-6):
            moved = (*found.thetas[:index], nearby, *found.thetas[index + 1 :])
            assert squares(Speed("ring", moved)) >= squares(found) - 1e-12


@pytest.mark.parametrize("algorithm", STEP_SECONDS)
def test_the_model_that_made_the_rates_is_chosen(algorithm: str) -> None:
    found = best_model(rates_of(algorithm, 1, 2, 3, 4, 6, 8, 16, 24))
    assert found is not None
    assert found[0] == algorithm
    assert found[1] < 1e-6


def test_capes_table_1_is_followed_within_5_percent() -> None:
    measured = {1: 318.0, 2: 576.2, 4: 1152.4, 8: 2177.8}
    for model in TERMS:
        speed = fit_speed(measured, model)
        assert {w: speed.rate(w) for w in measured} == pytest.approx(measured, rel=0.05)


def test_what_was_measured_is_kept_and_the_model_meets_the_last_point() -> None:
    measured = {1: 100.0, 2: 170.0, 4: 330.0}
    rates, notes = fitted_rates(measured, 16, "ring")
    assert {w: rates[w] for w in measured} == measured
    assert rates[4] < rates[5] < 5 * 330 / 4
    assert notes == ("interpolated between 2 and 4 GPUs", "above 4 GPUs by the model ring")


def test_nothing_is_fitted_where_all_was_measured() -> None:
    assert fitted_rates({1: 100.0, 2: 150.0}, 2) == ({1: 100.0, 2: 150.0}, ())


def test_one_point_is_proportional() -> None:
    rates, notes = fitted_rates({1: 100.0}, 3)
    assert rates == pytest.approx({1: 100.0, 2: 200.0, 3: 300.0})
    assert "too few to choose" in notes[-2]
    assert notes[-1] == "one point was measured: proportional"


def test_two_points_are_amdahls_law() -> None:
    rates, notes = fitted_rates({1: 100.0, 2: 160.0}, 8)
    assert rates[8] == pytest.approx(1 / (0.0075 / 8 + 0.0025))
    assert "2 points for 4 terms" in notes[-1]


def test_superlinear_rates_are_proportional_beyond() -> None:
    rates, notes = fitted_rates({1: 100.0, 2: 220.0, 4: 480.0}, 8, "ring")
    assert rates[8] == pytest.approx(960.0)
    assert "superlinear from 1 to 2 GPUs" in notes[-2]


def test_a_falling_table_is_said_and_stays_above_zero() -> None:
    rates, notes = fitted_rates({1: 100.0, 2: 180.0, 4: 90.0}, 64)
    assert min(rates.values()) > 0
    assert notes[-1] == "the rate falls from 2 to 4 GPUs"


def test_zero_rates_are_left_out_and_said() -> None:
    rates, notes = fitted_rates({1: 100.0, 2: 0.0, 4: math.nan}, 2)
    assert rates == pytest.approx({1: 100.0, 2: 200.0})
    assert notes[:2] == ("unusable rate at 2 GPUs left out", "unusable rate at 4 GPUs left out")


@pytest.mark.parametrize("measured", [{}, {1: 0.0}, {1: -3.0, 2: math.inf}])
def test_without_any_rate_it_is_refused(measured: dict[int, float]) -> None:
    with pytest.raises(BadInputError, match="no measured rate is above zero"):
        fitted_rates(measured, 4)
    with pytest.raises(BadInputError, match="no measured rate is above zero"):
        fit_speed(measured)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(BadInputError, match="unknown model of speed 'tree'") as caught:
        fit_speed({1: 1.0}, "tree")
    assert DEFAULT_MODEL in caught.value.hint


@settings(max_examples=80, deadline=None)
@given(
    measured=st.dictionaries(st.integers(1, 64), st.floats(1e-6, 1e9), min_size=1, max_size=6),
    max_gpus=st.integers(1, 128),
    model=st.sampled_from([None, *TERMS]),
)
def test_any_table_gives_a_usable_rate_on_every_number_of_gpus(
    measured: dict[int, float], max_gpus: int, model: str | None
) -> None:
    rates, _ = fitted_rates(measured, max_gpus, model)
    assert list(rates) == list(range(1, max_gpus + 1))
    assert all(math.isfinite(rate) and rate > 0 for rate in rates.values())
    last = max(measured)
    assert all(rates[w] <= rates[last] * w / last * (1 + 1e-9) for w in rates if w > last), (
        "no better than proportional beyond what was measured"
    )
