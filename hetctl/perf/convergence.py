"""When a member will have converged, from its losses so far (Capes et al., section 3.1, Equation 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetctl.core.ensemble import StopRule

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

    Array = NDArray[float64]

LEAST_POINTS = 3
"""Equation 1 has three parameters; fewer points than this say nothing about them."""
FLOORS = 64
"""Values of beta_2 that are tried."""
USUAL_NOISE = 0.02
"""Of losses, as a share of them; it counts as much as `USUAL_POINTS` residuals of a history's own, as
few points on a curve of three parameters say little of their noise."""
USUAL_POINTS = 4
LEAST_NOISE = 0.005
"""Losses are never taken to be more exact than this share of them."""
MOST_EPOCHS = 1e4


@dataclass(frozen=True)
class LossCurve:
    """Equation 1: loss(k) = 1 / (slope * k + start) + floor, with k in epochs.

    Parameters
    ----------
    slope, start, floor : float
        beta_0 > 0, beta_1 >= 0 and beta_2 >= 0 of the paper.
    noise : float
        Root mean square of the relative residuals of the fit; 0 for a curve that was not fitted.
    """

    slope: float
    start: float
    floor: float
    noise: float = 0.0

    def loss(self, epoch: float) -> float:
        """Return the loss after so many epochs."""
        return 1 / (self.slope * epoch + self.start) + self.floor


@dataclass(frozen=True)
class Guess:
    """What is thought of a member's epochs before its own losses are looked at.

    Parameters
    ----------
    epochs : float
        The median.
    spread : float
        Standard deviation of the natural logarithm.
    """

    epochs: float
    spread: float


@dataclass(frozen=True)
class Likelihood:
    """Curves that may have given a history, one for each floor tried.

    Parameters
    ----------
    curves : tuple of LossCurve
        Fitted by non-negative least squares.
    logs : tuple of float
        Logarithms of their likelihoods; the best has 0.
    """

    curves: tuple[LossCurve, ...]
    logs: tuple[float, ...]

    @property
    def best(self) -> LossCurve:
        """The most likely curve."""
        return self.curves[self.logs.index(max(self.logs))]


def fit_losses(losses: Sequence[float]) -> tuple[Likelihood | None, str]:
    """Fit Equation 1 to the losses after epochs 1, 2, ..; None and why, where that cannot be done.

    For a given floor the equation is linear: 1 / (loss - floor) = slope * k + start. Both are found by
    non-negative least squares, weighted so that noise in proportion to the loss counts alike in all
    epochs; floors are compared by the residuals of the losses themselves.
    """
    if len(losses) < LEAST_POINTS:
        return None, f"{len(losses)} epochs are too few for a fit: {LEAST_POINTS} are needed"
    if not all(math.isfinite(loss) and loss > 0 for loss in losses):
        return None, "a loss that is not a number above 0 cannot be fitted"
    half = len(losses) // 2
    if _mean(losses[half:]) >= _mean(losses[:half]):
        return None, "the loss does not fall: no fit"
    import numpy as np

    with np.errstate(all="ignore"):  # what comes of it is not usable, and left out
        return _fit(losses)


def _fit(losses: Sequence[float]) -> tuple[Likelihood | None, str]:
    import numpy as np

    observed = np.asarray(losses, dtype=float)
    epochs = np.arange(1.0, len(observed) + 1)
    floors = (observed.min() * (1 - np.geomspace(1e-3, 1, FLOORS)))[:, None]
    above = observed - floors
    slope, start = _line(epochs, 1 / above, (above**2 / observed) ** 2)
    expected = 1 / (slope[:, None] * epochs + start[:, None]) + floors
    squares = (((observed - expected) / observed) ** 2).sum(axis=1)
    usable = (slope > 1e-9) & (start >= 0) & np.isfinite(squares)
    if not usable.any():
        return None, "the loss does not follow Equation 1: no fit"
    slope, start, floor, squares = slope[usable], start[usable], floors[usable, 0], squares[usable]
    free = len(losses) - LEAST_POINTS
    variance = (USUAL_POINTS * USUAL_NOISE**2 + squares.min()) / (USUAL_POINTS + free)
    logs = -(squares - squares.min()) / (2 * variance)
    noise = math.sqrt(variance)
    curves = zip(slope.tolist(), start.tolist(), floor.tolist(), strict=True)
    return Likelihood(tuple(LossCurve(*c, noise) for c in curves), tuple(logs.tolist())), ""


def _line(epochs: Array, values: Array, weights: Array) -> tuple[Array, Array]:
    """Return slope and start, both >= 0, that fit each row of `values` best: NNLS in two variables.

    Where the free optimum has a negative start, the best one with start 0 is a line through the origin.
    """
    import numpy as np

    total = weights.sum(axis=1)
    x = (weights * epochs).sum(axis=1) / total
    y = (weights * values).sum(axis=1) / total
    slope = (weights * (epochs - x[:, None]) * (values - y[:, None])).sum(axis=1)
    slope /= (weights * (epochs - x[:, None]) ** 2).sum(axis=1)
    through_origin = (weights * epochs * values).sum(axis=1) / (weights * epochs**2).sum(axis=1)
    start = y - slope * x
    return np.where(start < 0, through_origin, np.maximum(slope, 0)), np.where(
        start < 0, 0, np.where(slope > 0, start, y)
    )


def epochs_to_converge(curve: LossCurve, stop: StopRule) -> float:
    """Return the epochs after which a member with this loss has converged, `max_epochs` at most.

    It has when it reaches the target, or when it gains no more than `min_delta` in `patience` epochs:
    with x = slope * k + start at the last epoch that still counts as better, x * (x + slope * patience)
    = slope * patience / min_delta. Gains that the noise of the fit would hide do not count as gains.
    """
    return float(min(_to_target(curve, stop.target), _to_standstill(curve, stop), stop.max_epochs))


def _to_target(curve: LossCurve, target: float | None) -> float:
    if target is None or target <= curve.floor:
        return math.inf
    return max((1 / (target - curve.floor) - curve.start) / curve.slope, 1.0)


def _to_standstill(curve: LossCurve, stop: StopRule) -> float:
    least_gain = stop.min_delta or curve.noise * (curve.floor or LEAST_NOISE)
    if least_gain <= 0:
        return math.inf
    step = curve.slope * stop.patience
    last = (math.sqrt(step * step + 4 * step / least_gain) - step) / 2
    return max((last - curve.start) / curve.slope, 0.0) + stop.patience


def predict_epochs(
    likelihood: Likelihood | None, stop: StopRule, done: int, guess: Guess | None
) -> tuple[float, float]:
    """Return how many epochs a member takes in all, more than `done`, and the spread of its logarithm.

    Each curve of the likelihood has its number of epochs; their mean logarithm, weighted by likelihood
    and by how near they are to the guess, is the prediction. Without a likelihood it is the guess, for
    those that come so far.
    """
    if likelihood is None:
        start = guess or Guess(float(stop.planned_epochs), 0.5)
        return _beyond(start, done), start.spread
    logs = [math.log(min(max(epochs_to_converge(c, stop), 1.0), MOST_EPOCHS)) for c in likelihood.curves]
    beliefs = [fit + _belief(log, guess) for fit, log in zip(likelihood.logs, logs, strict=True)]
    largest = max(beliefs)
    weights = [math.exp(belief - largest) for belief in beliefs]
    possible = [(w, log) for w, log in zip(weights, logs, strict=True) if math.exp(log) > done]
    total = math.fsum(w for w, _ in possible)
    if total <= 1e-12:
        return done + max(0.5, 0.03 * done), 0.1
    mean = math.fsum(w * log for w, log in possible) / total
    variance = math.fsum(w * (log - mean) ** 2 for w, log in possible) / total
    return max(math.exp(mean), done + 0.5), math.sqrt(variance)


def _belief(log: float, guess: Guess | None) -> float:
    return 0.0 if guess is None else -(((log - math.log(guess.epochs)) / guess.spread) ** 2) / 2


def _beyond(guess: Guess, done: int) -> float:
    """Return the median of a lognormal guess given that it is more than `done`."""
    if done < 1:
        return guess.epochs
    from statistics import NormalDist

    normal = NormalDist(math.log(guess.epochs), guess.spread)
    above = 1 - normal.cdf(math.log(done))
    if above < 1e-6:
        return done * 1.1 + 0.5
    return max(math.exp(normal.inv_cdf(1 - above / 2)), done + 0.5)


def errors_as_losses(values: Sequence[float], stop: StopRule) -> tuple[list[float], StopRule] | None:
    """Return a metric of which less is better, and its stop rule.

    An accuracy becomes an error rate, 1 - accuracy, which follows Equation 1 as a loss does. None for
    other metrics of which more is better.
    """
    if stop.mode == "min":
        return list(values), stop
    if not all(0 <= value <= 1 for value in values):
        return None
    target = None if stop.target is None else 1 - stop.target
    return [1 - value for value in values], replace(stop, mode="min", target=target)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values)
