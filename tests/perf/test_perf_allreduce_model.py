from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.errors import BadInputError
from hetctl.perf.allreduce_model import TERMS, best_model, fit_speed, fitted_rates


@dataclass(frozen=True)
class Cost:
    """Cost of one minibatch.

    Parameters
    ----------
    samples : int
        Samples of the minibatch on each GPU, m in the paper.
    compute_s : float
        Forward and backward time per sample: T_forward + T_back.
    bytes : float
        Size of the gradients in bytes, n in the paper.
    message_s, byte_s, reduce_s : float
        Seconds of latency per message, transfer per byte, and reduction per byte: alpha, beta and gamma.
    """

    samples: int
    compute_s: float
    bytes: float
    message_s: float
    byte_s: float
    reduce_s: float


def ring_s(cost: Cost, gpus: int) -> float:
    """Return the seconds of a minibatch with the ring algorithm (Equation 2)."""
    steps, part = gpus - 1, cost.bytes / gpus
    exchange_s = 4 * cost.message_s + part * (4 * cost.byte_s + 2 * cost.reduce_s)
    return cost.samples * cost.compute_s + steps * exchange_s


def doubling_halving_s(cost: Cost, gpus: int) -> float:
    """Return the seconds of a minibatch with doubling-halving, for powers of two (Equation 3)."""
    latency_s = 4 * math.log2(gpus) * cost.message_s
    return cost.samples * cost.compute_s + latency_s + cost.bytes * (4 * cost.byte_s + 2.5 * cost.reduce_s)


def binary_blocks_s(cost: Cost, gpus: int) -> float:
    """Return the seconds of a minibatch with binary blocks, for any number of GPUs (Equation 4)."""
    latency_s = (5 + 4 * math.ceil(math.log2(gpus))) * cost.message_s
    return cost.samples * cost.compute_s + latency_s + cost.bytes * (7 * cost.byte_s + 3 * cost.reduce_s)


MINIBATCH_S: dict[str, Callable[[Cost, int], float]] = {
    "ring": ring_s,
    "doubling-halving": doubling_halving_s,
    "binary-blocks": binary_blocks_s,
}

COST = Cost(samples=128, compute_s=0.003, bytes=1e7, message_s=2e-3, byte_s=1e-9, reduce_s=5e-10)
CAPES = {1: 318.0, 2: 576.2, 4: 1152.4, 8: 2177.8}
"""Table 1: images/s of ResNet-110."""
every_algorithm = pytest.mark.parametrize("algorithm", TERMS)


def rates_of(algorithm: str, counts: tuple[int, ...]) -> dict[int, float]:
    """Samples/s where the global batch stays as it is: m / w samples on each of w GPUs."""
    found = {}
    for gpus in counts:
        share = Cost(1, COST.compute_s * 128 / gpus, COST.bytes, COST.message_s, COST.byte_s, COST.reduce_s)
        found[gpus] = 128 / MINIBATCH_S[algorithm](share, gpus)
    return found


def test_equations_2_to_4_by_hand() -> None:
    cost = Cost(samples=2, compute_s=1.0, bytes=8.0, message_s=10.0, byte_s=0.5, reduce_s=0.25)
    assert MINIBATCH_S["ring"](cost, 4) == 2 + 3 * 4 * 10 + 3 * (8 / 4) * 4 * 0.5 + 3 * (8 / 4) * 2 * 0.25
    assert MINIBATCH_S["doubling-halving"](cost, 4) == 2 + 4 * 2 * 10 + 4 * 8 * 0.5 + 2.5 * 8 * 0.25
    assert MINIBATCH_S["binary-blocks"](cost, 5) == 2 + (5 + 4 * 3) * 10 + 7 * 8 * 0.5 + 3 * 8 * 0.25


@every_algorithm
def test_a_fit_foretells_the_rates_of_its_own_algorithm(algorithm: str) -> None:
    model = fit_speed(rates_of(algorithm, (1, 2, 4, 8)), algorithm)
    expected = rates_of(algorithm, (16, 32))
    assert [model.rate(16), model.rate(32)] == pytest.approx(list(expected.values()), rel=0.01)
    assert model.error < 1e-6


@every_algorithm
def test_the_best_model_is_the_one_that_foretells_best(algorithm: str) -> None:
    measured = rates_of(algorithm, (1, 2, 3, 4, 6, 8, 12))
    assert best_model(measured).error < 0.002


def test_the_papers_own_profile_is_fitted() -> None:
    rates, notes = fitted_rates(CAPES, 16)
    assert {gpus: rates[gpus] for gpus in CAPES} == CAPES
    assert CAPES[4] < rates[6] < CAPES[8] < rates[16] <= 2 * CAPES[8]
    assert any("Equation 5" in note for note in notes)


def test_too_few_rates_are_extended_in_proportion_with_a_note() -> None:
    rates, notes = fitted_rates({2: 20.0}, 4)
    assert rates == {1: 20.0, 2: 20.0, 3: 30.0, 4: 40.0}
    assert "too few" in notes[-1]


def test_zero_rates_are_dropped_superlinear_ones_not_extended() -> None:
    rates, notes = fitted_rates({1: 10.0, 2: 0.0, 4: 60.0, 8: 100.0}, 16)
    assert rates[4] == 60.0
    assert rates[16] <= 200.0
    assert any("2 GPUs left out" in note for note in notes)
    assert any("superlinear" in note for note in notes)


def test_no_usable_rate_is_refused() -> None:
    with pytest.raises(BadInputError):
        fitted_rates({1: 0.0, 2: math.nan}, 4)


@given(st.dictionaries(st.integers(1, 64), st.floats(1e-3, 1e6), min_size=1, max_size=8))
def test_any_table_gives_positive_finite_rates(measured: dict[int, float]) -> None:
    rates, _ = fitted_rates(measured, 80)
    assert list(rates) == list(range(1, 81))
    assert all(math.isfinite(rate) and rate > 0 for rate in rates.values())
    assert all(rates[gpus] == rate for gpus, rate in measured.items())
