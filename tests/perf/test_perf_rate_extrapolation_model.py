from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from hetctl.perf.rate_extrapolation import fit_speed


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
