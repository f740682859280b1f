"""Speed on w GPUs that sum their gradients in a ring or a tree (Capes et al., section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hetctl.model.errors import BadInputError
from hetctl.perf.rate_extrapolation import usable_rates

LEAST_POINTS = 3
"""Least number of points from which computation and communication can be separated."""

LEAST_S = 1e-12
"""Least seconds of a sample: a fit may find that a number of GPUs takes no time at all."""


Terms = Callable[[int], tuple[float, ...]]

TERMS: dict[str, Terms] = {
    "ring": lambda w: (1 / w, w - 1, (w - 1) / w, 1.0),
    "doubling-halving": lambda w: (1 / w, math.log2(w), float(w > 1), 1.0),
    "binary-blocks": lambda w: (1 / w, math.ceil(math.log2(w)), float(w > 1), 1.0),
}
"""Terms of the time per sample on w GPUs, up to fitted factors >= 0: computation, latency, transfer, rest.
For the ring this is Equation 5, with m and n included in theta_0 and theta_2; for the other two algorithms
the second and third term are those of Equations 3 and 4."""


@dataclass(frozen=True)
class SpeedModel:
    """Seconds per sample on w GPUs as a sum of terms (Equation 5).

    Parameters
    ----------
    algorithm : str
        Algorithm, a key of `TERMS`.
    theta : tuple of float
        Factors of the terms, all >= 0.
    error : float
        Root mean square of the relative residuals.
    """

    algorithm: str
    theta: tuple[float, ...]
    error: float

    def rate(self, gpus: int) -> float:
        """Return samples/s: f(w) of Equation 5."""
        terms = TERMS[self.algorithm](gpus)
        seconds = math.fsum(factor * term for factor, term in zip(self.theta, terms, strict=True))
        return 1 / max(seconds, LEAST_S)


def fit_speed(measured: Mapping[int, float], algorithm: str) -> SpeedModel:
    """Fit Equation 5 to rates by non-negative least squares of their relative errors.

    Raises
    ------
    BadInputError
        If no rate is above zero.
    """
    # Imported on use: every driver imports this module with the planners, and most never fit a speed.
    import numpy as np
    from scipy.optimize import nnls

    points = usable_rates(measured)
    if not points:
        raise BadInputError("no measured rate is above zero", hint="run hetctl profile")
    # Rows times rate have the target 1, so that the residuals are relative errors.
    rows = np.array([[rate * term for term in TERMS[algorithm](gpus)] for gpus, rate in points.items()])
    theta, residual = nnls(rows, np.ones(len(points)))
    return SpeedModel(algorithm, tuple(theta.tolist()), float(residual) / math.sqrt(len(points)))


def best_model(measured: Mapping[int, float]) -> SpeedModel:
    """Return the model of the algorithm that predicts each point best from the other points."""
    points = usable_rates(measured)
    if len(points) <= LEAST_POINTS:
        return min((fit_speed(measured, algorithm) for algorithm in TERMS), key=lambda model: model.error)
    return fit_speed(points, min(TERMS, key=lambda algorithm: _error_left_out(points, algorithm)))


def _error_left_out(points: Mapping[int, float], algorithm: str) -> float:
    """Return the error of predicting each point but the first, to which no other point is informative."""
    errors = []
    for left_out, rate in list(points.items())[1:]:
        others = {gpus: value for gpus, value in points.items() if gpus != left_out}
        errors.append((fit_speed(others, algorithm).rate(left_out) / rate - 1) ** 2)
    return math.fsum(errors)


def fitted_rates(measured: Mapping[int, float], max_gpus: int) -> tuple[dict[int, float], tuple[str, ...]]:
    """Return the rate on each of 1 to `max_gpus` GPUs, and notes on the method.

    Measured rates are kept. All others are the model's, scaled by its error at the nearest measured number of
    GPUs, and never better than proportional to the rate of the next lower measured number.

    Raises
    ------
    BadInputError
        If no rate is above zero.
    """
    points = usable_rates(measured)
    model = best_model(measured)
    notes = [f"unusable rate at {m} GPUs left out" for m in sorted(measured) if m not in points]
    limits = {gpus: _limit(points, gpus) for gpus in range(1, max_gpus + 1)}
    if len(points) < LEAST_POINTS:
        notes.append(f"{len(points)} rates are too few for Equation 5: in proportion to the GPUs")
        return {m: points.get(m, limit) for m, limit in limits.items()}, tuple(notes)
    notes.append(f"Equation 5 for {model.algorithm}, off by {model.error:.1%} where rates were measured")
    if any(points[a] / a < points[b] / b for a in points for b in points if a < b):
        notes.append("superlinear rates are kept where they were measured, and not continued")
    rates = {m: points.get(m, min(_near(model, points, m), limit)) for m, limit in limits.items()}
    return rates, tuple(notes)


def _near(model: SpeedModel, points: Mapping[int, float], gpus: int) -> float:
    # Nearest in the ratio of the numbers, not in their difference: 8 is nearer to 16 than to 1.
    known = min(points, key=lambda m: abs(math.log(m / gpus)))
    return model.rate(gpus) * points[known] / model.rate(known)


def _limit(points: Mapping[int, float], gpus: int) -> float:
    """Return the upper limit of a rate: proportional to the next lower measured one, or else the highest."""
    known = max((m for m in points if m <= gpus), default=0)
    return points[known] * gpus / known if known else max(points.values())
