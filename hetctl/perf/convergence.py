"""Prediction of convergence from a member's losses (Capes et al., section 3.1, Equation 1)."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetctl.model.ensemble import StopRule

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

    Array = NDArray[float64]

LEAST_POINTS = 3
"""Least number of points: Equation 1 has three parameters."""
FLOORS = 64
"""Number of values of beta_2 that are tried."""
TOGETHER = 128
"""Most members that are fitted at once, so that their intermediate results fit into the processor's cache."""
USUAL_NOISE = 0.02
"""Usual noise of losses, relative to them. It counts as much as `USUAL_POINTS` residuals of a history,
because few points on a curve of three parameters are a poor estimate of their noise."""
USUAL_POINTS = 4
LEAST_NOISE = 0.005
"""Least noise of losses that is assumed, relative to them."""
MOST_EPOCHS = 1e4
LEAST_WEIGHT = 1e-12
"""Least total likelihood of all curves, relative to the most likely one, for any to be possible."""


@dataclass(frozen=True)
class LossCurve:
    """Equation 1: loss(k) = 1 / (slope * k + start) + floor, with k in epochs.

    Parameters
    ----------
    slope, start, floor : float
        beta_0 > 0, beta_1 >= 0 and beta_2 >= 0 of the paper.
    noise : float
        Root mean square of the relative residuals of the fit; 0 for a curve without a fit.
    """

    slope: float
    start: float
    floor: float
    noise: float = 0.0

    def loss(self, epoch: float) -> float:
        """Return the loss after a number of epochs (Equation 1)."""
        return 1 / (self.slope * epoch + self.start) + self.floor


@dataclass(frozen=True)
class EpochPrior:
    """Prior estimate of a member's epochs, made without its own losses.

    Parameters
    ----------
    epochs : float
        Median number of epochs.
    spread : float
        Standard deviation of the natural logarithm of the epochs.
    """

    epochs: float
    spread: float


@dataclass(frozen=True, eq=False)
class Likelihood:
    """Curves that may have produced a history, one for each floor that was tried.

    Parameters
    ----------
    slopes, starts, floors : array
        Parameters of the curves, fitted by non-negative least squares.
    noise : float
        Noise as in `LossCurve`, equal for all curves.
    logs : array
        Logarithms of the likelihoods of the curves; the best one has 0.
    """

    slopes: Array
    starts: Array
    floors: Array
    noise: float
    logs: Array

    @property
    def best(self) -> LossCurve:
        """Most likely curve."""
        i = self.logs.argmax()
        return LossCurve(float(self.slopes[i]), float(self.starts[i]), float(self.floors[i]), self.noise)


def fit_losses(losses: Sequence[float]) -> tuple[Likelihood | None, str]:
    """Fit Equation 1 to the losses after epochs 1, 2, ..; return None and the reason if impossible.

    For a given floor the equation is linear: 1 / (loss - floor) = slope * k + start. Slope and start are
    found by non-negative least squares, weighted so that noise proportional to the loss has equal weight in
    all epochs; floors are compared by the residuals of the losses themselves.
    """
    (found,) = fit_histories([losses])
    return found


def fit_histories(histories: Sequence[Sequence[float]]) -> list[tuple[Likelihood | None, str]]:
    """Fit the losses of several members as `fit_losses` does; histories of one length are fitted at once."""
    found: list[tuple[Likelihood | None, str]] = [(None, _unfit(losses)) for losses in histories]
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, losses in enumerate(histories):
        if not found[i][1]:
            by_length[len(losses)].append(i)
    for same in by_length.values():
        for at in range(0, len(same), TOGETHER):
            chosen = same[at : at + TOGETHER]
            for i, fit in zip(chosen, _fit([histories[i] for i in chosen]), strict=True):
                found[i] = fit, "" if fit else "the loss does not follow Equation 1: no fit"
    return found


def _unfit(losses: Sequence[float]) -> str:
    """Return the reason why losses cannot be fitted; empty if they can."""
    if len(losses) < LEAST_POINTS:
        return f"{len(losses)} epochs are too few for a fit: {LEAST_POINTS} are needed"
    if not all(math.isfinite(loss) and loss > 0 for loss in losses):
        return "a loss that is not a number above 0 cannot be fitted"
    half = len(losses) // 2
    if _mean(losses[half:]) >= _mean(losses[:half]):
        return "the loss does not fall: no fit"
    return ""


def _fit(histories: Sequence[Sequence[float]]) -> list[Likelihood | None]:
    """Fit histories of one length."""
    import numpy as np

    observed = np.asarray(histories, dtype=float)[:, None, :]
    epochs = np.arange(1.0, observed.shape[-1] + 1)
    with np.errstate(all="ignore"):  # NaN and infinite results are discarded below
        floors = (observed.min(axis=-1) * (1 - _shares()))[:, :, None]
        above = observed - floors
        # d(1/above) = -d(loss)/above^2, and the noise of a loss is proportional to it: hence these weights.
        slope, start = _line(epochs, 1 / above, (above**2 / observed) ** 2)
        expected = 1 / (slope[..., None] * epochs + start[..., None]) + floors
        squares = (((observed - expected) / observed) ** 2).sum(axis=-1)
    # Divisions by a slope near 0 would overflow later.
    usable = (slope > 1e-9) & (start >= 0) & np.isfinite(squares)
    free = observed.shape[-1] - LEAST_POINTS
    rows = zip(slope, start, floors[..., 0], squares, usable, strict=True)
    return [_likelihood(a[kept], b[kept], c[kept], d[kept], free) for a, b, c, d, kept in rows]


def _likelihood(slopes: Array, starts: Array, floors: Array, squares: Array, free: int) -> Likelihood | None:
    """Return the curves with their likelihoods from their residuals; None if there is no curve."""
    if not len(squares):
        return None
    least = float(squares.min())
    variance = (USUAL_POINTS * USUAL_NOISE**2 + least) / (USUAL_POINTS + free)
    return Likelihood(slopes, starts, floors, math.sqrt(variance), (least - squares) / (2 * variance))


@functools.cache
def _shares() -> Array:
    """Return the distances of the floors tried from the least loss, relative to it."""
    import numpy as np

    return np.geomspace(1e-3, 1, FLOORS)


def _line(epochs: Array, values: Array, weights: Array) -> tuple[Array, Array]:
    """Return slope and start, both >= 0, that fit `values` best along the last axis (NNLS in two variables).

    If the unconstrained optimum has a negative start, the best line with start 0 passes through the origin.
    """
    import numpy as np

    total = weights.sum(axis=-1)
    x = (weights * epochs).sum(axis=-1) / total
    y = (weights * values).sum(axis=-1) / total
    slope = (weights * (epochs - x[..., None]) * (values - y[..., None])).sum(axis=-1)
    slope /= (weights * (epochs - x[..., None]) ** 2).sum(axis=-1)
    through_origin = (weights * epochs * values).sum(axis=-1) / (weights * epochs**2).sum(axis=-1)
    start = y - slope * x
    return np.where(start < 0, through_origin, np.maximum(slope, 0)), np.where(
        start < 0, 0, np.where(slope > 0, start, y)
    )


def epochs_to_converge(curve: LossCurve, stop: StopRule) -> float:
    """Return the number of epochs until a member with this loss has converged, at most `max_epochs`.

    A member converges when it reaches the target, or when it improves by at most `min_delta` in `patience`
    epochs: with x = slope * k + start at the last epoch that still improves, x * (x + slope * patience) =
    slope * patience / min_delta. Improvements smaller than the noise of the fit do not count.
    """
    return float(min(_to_target(curve, stop.target), _to_standstill(curve, stop), stop.max_epochs))


def _to_target(curve: LossCurve, target: float | None) -> float:
    if target is None or target <= curve.floor:
        return math.inf
    # Unlike NumPy's, these numbers become infinite without a warning.
    height, start, slope = map(float, (target - curve.floor, curve.start, curve.slope))
    return max((1 / height - start) / slope, 1.0)


def _to_standstill(curve: LossCurve, stop: StopRule) -> float:
    least_gain = stop.min_delta or curve.noise * (curve.floor or LEAST_NOISE)
    if least_gain <= 0:
        return math.inf
    step = curve.slope * stop.patience
    last = (math.sqrt(step * step + 4 * step / least_gain) - step) / 2
    return max((last - curve.start) / curve.slope, 0.0) + stop.patience


def predict_epochs(
    likelihood: Likelihood | None, stop: StopRule, done: int, prior: EpochPrior | None
) -> tuple[float, float]:
    """Return a member's total number of epochs, more than `done`, and the spread of its logarithm.

    Each curve of the likelihood has its number of epochs; the prediction is their mean logarithm, weighted by
    likelihood and by closeness to the prior. Without a likelihood the prediction is the prior, conditional on
    more than `done` epochs.
    """
    if likelihood is None:
        start = prior or EpochPrior(float(stop.planned_epochs), 0.5)
        return _beyond(start, done), start.spread
    logs = log_epochs(likelihood, stop).tolist()
    return weighted_epochs(likelihood.logs.tolist(), logs, done, prior)


def log_epochs(likelihood: Likelihood, stop: StopRule) -> Array:
    """Return the logarithms of the epochs to convergence of all curves, as in `epochs_to_converge`."""
    import numpy as np

    with np.errstate(all="ignore"):  # infinite results become `max_epochs`
        epochs = np.fmin(_all_to_target(likelihood, stop.target), _all_to_standstill(likelihood, stop))
        found: Array = np.log(np.clip(np.fmin(epochs, stop.max_epochs), 1.0, MOST_EPOCHS))
    return found


def _all_to_target(curves: Likelihood, target: float | None) -> Array | float:
    import numpy as np

    if target is None:
        return math.inf
    epochs = np.maximum((1 / (target - curves.floors) - curves.starts) / curves.slopes, 1.0)
    return np.where(target > curves.floors, epochs, math.inf)


def _all_to_standstill(curves: Likelihood, stop: StopRule) -> Array:
    import numpy as np

    least_gains = stop.min_delta or curves.noise * np.where(curves.floors > 0, curves.floors, LEAST_NOISE)
    steps = curves.slopes * stop.patience
    lasts = (np.sqrt(steps * steps + 4 * steps / least_gains) - steps) / 2
    epochs: Array = np.maximum((lasts - curves.starts) / curves.slopes, 0.0) + stop.patience
    return epochs


def weighted_epochs(
    fits: Sequence[float], logs: Sequence[float], done: int, prior: EpochPrior | None
) -> tuple[float, float]:
    """Return the weighted mean of the epochs of curves, as `predict_epochs` does.

    Parameters
    ----------
    fits, logs : sequence of float
        Logarithms of the curves' likelihoods, and of their epochs to convergence.
    """
    log_weights = [fit + _log_prior(log, prior) for fit, log in zip(fits, logs, strict=True)]
    # Subtracting the largest logarithm keeps exp() from underflowing for all curves at once.
    largest = max(log_weights)
    weights = [math.exp(log_weight - largest) for log_weight in log_weights]
    possible = [(w, log) for w, log in zip(weights, logs, strict=True) if math.exp(log) > done]
    total = math.fsum(w for w, _ in possible)
    if total <= LEAST_WEIGHT:
        return done + max(0.5, 0.03 * done), 0.1
    mean = math.fsum(w * log for w, log in possible) / total
    variance = math.fsum(w * (log - mean) ** 2 for w, log in possible) / total
    return max(math.exp(mean), done + 0.5), math.sqrt(variance)


def _log_prior(log: float, prior: EpochPrior | None) -> float:
    return 0.0 if prior is None else -(((log - math.log(prior.epochs)) / prior.spread) ** 2) / 2


def _beyond(prior: EpochPrior, done: int) -> float:
    """Return the median of a lognormal prior under the condition that it is more than `done`."""
    if done < 1:
        return prior.epochs
    from statistics import NormalDist

    normal = NormalDist(math.log(prior.epochs), prior.spread)
    above = 1 - normal.cdf(math.log(done))
    # So far in the tail, 1 - cdf is mostly rounding error, and inv_cdf(1) would raise.
    if above < 1e-6:
        return done * 1.1 + 0.5
    return max(math.exp(normal.inv_cdf(1 - above / 2)), done + 0.5)


def errors_as_losses(values: Sequence[float], stop: StopRule) -> tuple[list[float], StopRule] | None:
    """Return a metric to be minimized, and its stop rule.

    An accuracy is converted to an error rate, 1 - accuracy, which follows Equation 1 like a loss. None for
    other metrics to be maximized.
    """
    if stop.mode == "min":
        return list(values), stop
    if not all(0 <= value <= 1 for value in values):
        return None
    target = None if stop.target is None else 1 - stop.target
    return [1 - value for value in values], replace(stop, mode="min", target=target)


def _mean(values: Sequence[float]) -> float:
    # Divided first: the sum of very large losses would overflow.
    return math.fsum(value / len(values) for value in values)
