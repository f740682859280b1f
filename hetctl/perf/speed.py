"""Training rates from what an all-reduce costs (Capes et al., section 3.2, Equations 2 to 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from hetctl.core.errors import BadInputError
from hetctl.perf.scaling import rate_curve, usable_rates

LEAST_TO_CHOOSE = 3
"""Points that are needed to leave one out and fit the rest."""
LEAST_SHARE = 1e-9
"""Of the largest theta, for computing: without it one GPU alone would take no time."""
SUPERLINEAR = 1.01
"""Growth of the rate per GPU beyond which it is more than noise."""


@dataclass(frozen=True)
class StepCosts:
    """What a step of training is made of.

    Parameters
    ----------
    minibatch : float
        Samples per GPU, m in the paper.
    forward_s, back_s : float
        Per sample, T_forward and T_back.
    model_bytes : float
        n.
    latency_s : float
        Per message, alpha.
    transfer_s, reduce_s : float
        Per byte, beta and gamma.
    """

    minibatch: float
    forward_s: float
    back_s: float
    model_bytes: float
    latency_s: float
    transfer_s: float
    reduce_s: float

    @property
    def computing_s(self) -> float:
        """Forward and backward pass of a minibatch."""
        return self.minibatch * (self.forward_s + self.back_s)


def ring_step_s(costs: StepCosts, gpus: int) -> float:
    """Return seconds per step with the ring algorithm (Equation 2)."""
    share = (gpus - 1) * costs.model_bytes / gpus
    messages_s = (gpus - 1) * 4 * costs.latency_s
    return costs.computing_s + messages_s + share * (4 * costs.transfer_s + 2 * costs.reduce_s)


def doubling_halving_step_s(costs: StepCosts, gpus: int) -> float:
    """Return seconds per step with doubling-halving (Equation 3), which needs a power of two."""
    if gpus == 1:
        return costs.computing_s
    per_byte_s = 4 * costs.transfer_s + 2.5 * costs.reduce_s
    return costs.computing_s + 4 * math.log2(gpus) * costs.latency_s + costs.model_bytes * per_byte_s


def binary_blocks_step_s(costs: StepCosts, gpus: int) -> float:
    """Return seconds per step with binary blocks (Equation 4), for any number of GPUs."""
    if gpus == 1:
        return costs.computing_s
    messages = 5 + 4 * math.ceil(math.log2(gpus))
    per_byte_s = 7 * costs.transfer_s + 3 * costs.reduce_s
    return costs.computing_s + messages * costs.latency_s + costs.model_bytes * per_byte_s


STEP_SECONDS: dict[str, Callable[[StepCosts, int], float]] = {
    "ring": ring_step_s,
    "doubling-halving": doubling_halving_step_s,
    "binary-blocks": binary_blocks_step_s,
}
"""Equations 2 to 4. One GPU alone exchanges nothing, whatever the algorithm."""


def _equation_5(w: int) -> tuple[float, ...]:
    return 1 / w, 1.0, w - 1.0, (w - 1) / w


def _ring(w: int) -> tuple[float, ...]:
    return 1 / w, (w - 1) / w, (w - 1) / w**2


def _doubling_halving(w: int) -> tuple[float, ...]:
    return 1 / w, math.log2(w) / w, (w > 1) / w


def _binary_blocks(w: int) -> tuple[float, ...]:
    return 1 / w, math.ceil(math.log2(w)) / w, (w > 1) / w


TERMS: dict[str, Callable[[int], tuple[float, ...]]] = {
    "equation-5": _equation_5,
    "ring": _ring,
    "doubling-halving": _doubling_halving,
    "binary-blocks": _binary_blocks,
}
"""Seconds per sample on w GPUs are a sum of these terms, each times its theta >= 0.

``equation-5`` is as printed, with m and n in the thetas, its terms in the order theta_0, theta_3, theta_1,
theta_2: a minibatch is of constant size and shared by the GPUs. The second term is the sum of the first and
the last, so several thetas may give the same rates. The others are Equations 2 to 4 divided by the m * w
samples of a step, as each GPU has a minibatch of constant size: computing, messages, bytes.
"""
DEFAULT_MODEL = "equation-5"


@dataclass(frozen=True)
class Speed:
    """A fitted model of the rate.

    Parameters
    ----------
    thetas : tuple of float
        The first is above 0, none below; terms beyond them are left out.
    """

    model: str
    thetas: tuple[float, ...]

    def rate(self, gpus: int) -> float:
        """Return samples/s."""
        return 1 / sum(t * term for t, term in zip(self.thetas, TERMS[self.model](gpus), strict=False))


def fit_speed(measured: Mapping[int, float], model: str = DEFAULT_MODEL) -> Speed:
    """Fit a model to rates by number of GPUs: non-negative least squares on their relative errors.

    With fewer points than terms, the last terms are left out. Unusable rates do not count.

    Raises
    ------
    BadInputError
        If no measured rate is above zero, or there is no such model.
    """
    points = usable_rates(measured)
    if not points:
        raise BadInputError("no measured rate is above zero", hint="run hetctl profile")
    if model not in TERMS:
        raise BadInputError(f"unknown model of speed {model!r}", hint=f"one of: {', '.join(TERMS)}")
    return Speed(model, _thetas(points, model))


def _thetas(points: Mapping[int, float], model: str) -> tuple[float, ...]:
    """Return the thetas for rates in terms of the highest one, so that extreme ones do no harm."""
    import numpy as np
    from scipy.optimize import nnls

    unit = max(points.values())
    rows = np.array([TERMS[model](gpus)[: len(points)] for gpus in points])
    rows *= np.array([rate / unit for rate in points.values()])[:, None]
    sizes = np.linalg.norm(rows, axis=0)
    sizes[sizes == 0] = 1.0
    found, _ = nnls(rows / sizes, np.ones(len(points)))
    thetas = found / sizes / unit
    thetas[0] = max(thetas[0], LEAST_SHARE * thetas.max())
    return tuple(thetas.tolist())


def best_model(measured: Mapping[int, float]) -> tuple[str, float] | None:
    """Return the model that tells points best which it was not fitted to, and its relative error.

    The error is the root mean square over the points, each but the smallest left out once: nobody asks
    for fewer GPUs. None with too few points.
    """
    points = usable_rates(measured)
    if len(points) < LEAST_TO_CHOOSE:
        return None
    errors = {model: _error_left_out(points, model) for model in TERMS}
    best = min(errors, key=lambda model: errors[model])
    return best, errors[best]


def _error_left_out(points: Mapping[int, float], model: str) -> float:
    squares = []
    for gpus in sorted(points)[1:]:
        rest = {m: rate for m, rate in points.items() if m != gpus}
        squares.append(math.log(fit_speed(rest, model).rate(gpus) / points[gpus]) ** 2)
    return math.sqrt(math.fsum(squares) / len(squares))


def fitted_rates(
    measured: Mapping[int, float], max_gpus: int, model: str | None = None
) -> tuple[dict[int, float], tuple[str, ...]]:
    """Return the rate on each of 1 to `max_gpus` GPUs, and in words how those not measured were found.

    Up to the largest measured number they are as in `scaling.rate_curve`. Beyond it stands the fitted
    model, scaled to meet the last point.

    Parameters
    ----------
    model : str or None
        A key of `TERMS`; None: the best by leaving one out.

    Raises
    ------
    BadInputError
        If no measured rate is above zero, or there is no such model.
    """
    points = usable_rates(measured)
    last = max(points, default=1)
    rates, notes = rate_curve(measured, min(max_gpus, last), 1)
    if max_gpus <= last:
        return rates, notes
    used, why = _chosen(points, model)
    speed = fit_speed(points, used)
    scale = points[last] / speed.rate(last)
    rates |= {gpus: scale * speed.rate(gpus) for gpus in range(last + 1, max_gpus + 1)}
    return rates, (*notes, f"above {last} GPUs by {why}", *_doubts(points, used))


def _chosen(points: Mapping[int, float], model: str | None) -> tuple[str, str]:
    if model is not None:
        return model, f"the model {model}"
    best = best_model(points)
    if best is None:
        return DEFAULT_MODEL, f"the model {DEFAULT_MODEL}: {len(points)} points are too few to choose"
    return best[0], f"the model {best[0]}: off by {best[1]:.1%} on points left out"


def _doubts(points: Mapping[int, float], model: str) -> list[str]:
    """Say where the points are too few, or not what the model can follow."""
    doubts = []
    terms = len(TERMS[model](1))
    if len(points) == 1:
        doubts.append("one point was measured: proportional")
    elif len(points) < terms:
        doubts.append(f"{len(points)} points for {terms} terms: the last terms are left out")
    for low, high in pairwise(points):
        if points[high] / high > SUPERLINEAR * points[low] / low:
            doubts.append(f"superlinear from {low} to {high} GPUs, which the model cannot follow")
        elif points[high] < points[low]:
            doubts.append(f"the rate falls from {low} to {high} GPUs")
    return doubts
