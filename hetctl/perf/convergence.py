"""Prediction of convergence from members' losses (Capes et al., section 3.1, Equation 1)."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

from hetctl.model.ensemble import Member, StopRule
from hetctl.model.training_progress import EpochHistory, Progress

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

    Array = NDArray[float64]

LEAST_POINTS = 3
"""Least number of points: Equation 1 has three parameters."""
FLOORS = 64
"""Number of values of beta_2 that are tried."""
MOST_FITTED_AT_ONCE = 128
"""Most members that are fitted at once, so that their intermediate results fit into the processor's cache."""
USUAL_NOISE = 0.02
"""Usual noise of losses, relative to them. It counts as much as `USUAL_POINTS` residuals of a history:
few points on a curve of three parameters tell little of their noise."""
USUAL_POINTS = 4
LEAST_NOISE = 0.005
"""Least noise of losses that is assumed, relative to them."""
MOST_EPOCHS = 1e4
LEAST_WEIGHT = 1e-12
"""Least total likelihood of all curves, relative to the most likely one: below it none is possible."""
LEAST_OTHERS = 3
"""Fewest known members that predict one without results and without `expected_epochs`."""
AUTHORS_SPREAD = 0.5
"""Spread of the logarithm of an author's `expected_epochs`, that is a factor of e^0.5."""
PRIOR_DIGITS = 2
"""Decimals of the logarithms of the others' epochs: rounded, one member's epoch does not change all other
predictions."""


class EpochPrior(NamedTuple):
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


NO_PRIOR = EpochPrior(1.0, math.inf)


class LossFit(NamedTuple):
    """Curves of Equation 1 that may have produced a history, one for each floor that was tried.

    Parameters
    ----------
    logs : array, (FLOORS,)
        Logarithms of the likelihoods of the curves; the best one has 0, and an impossible one minus infinity.
    log_epochs : array, (FLOORS,)
        Logarithms of their epochs to convergence.
    done : int
        Number of the finished epochs.
    """

    logs: Array
    log_epochs: Array
    done: int


def fit_histories(histories: Sequence[tuple[Sequence[float], StopRule]]) -> list[LossFit | None]:
    """Fit Equation 1 to the losses of members after epochs 1, 2, ..; None where no such curve fits.

    For a given floor the equation is linear: 1 / (loss - floor) = slope * k + start. Slope and start are
    found by non-negative least squares, weighted so that noise proportional to the loss has equal weight in
    all epochs; floors are compared by the residuals of the losses themselves. Histories of one length are
    fitted at once.
    """
    found: list[LossFit | None] = [None] * len(histories)
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, (losses, _) in enumerate(histories):
        if _falls(losses):
            by_length[len(losses)].append(i)
    for same in by_length.values():
        for at in range(0, len(same), MOST_FITTED_AT_ONCE):
            chosen = same[at : at + MOST_FITTED_AT_ONCE]
            for i, fit in zip(chosen, _fit([histories[i] for i in chosen]), strict=True):
                found[i] = fit
    return found


def _falls(losses: Sequence[float]) -> bool:
    half = len(losses) // 2
    return (
        len(losses) >= LEAST_POINTS
        and all(math.isfinite(loss) and loss > 0 for loss in losses)
        and _mean(losses[half:]) < _mean(losses[:half])
    )


def _mean(values: Sequence[float]) -> float:
    # Divided first: the sum of very large losses would overflow.
    return math.fsum(value / len(values) for value in values)


def _fit(histories: Sequence[tuple[Sequence[float], StopRule]]) -> list[LossFit | None]:
    """Fit histories of one length."""
    import numpy as np

    observed = np.asarray([losses for losses, _ in histories], dtype=float)[:, None, :]
    count = observed.shape[-1]
    epochs = np.arange(1.0, count + 1)
    with np.errstate(all="ignore"):  # NaN and infinite results are discarded below
        floors = observed.min(axis=-1) * (1 - _shares())
        above = observed - floors[..., None]
        # d(1/above) = -d(loss)/above^2, and the noise of a loss is proportional to it: hence these weights.
        slopes, starts = fit_line(epochs, 1 / above, (above**2 / observed) ** 2)
        expected = 1 / (slopes[..., None] * epochs + starts[..., None]) + floors[..., None]
        squares = (((observed - expected) / observed) ** 2).sum(axis=-1)
    # Divisions by a slope near 0 would overflow later.
    usable = (slopes > 1e-9) & (starts >= 0) & np.isfinite(squares)
    squares = np.where(usable, squares, np.inf)
    least = squares.min(axis=-1)
    variances = (USUAL_POINTS * USUAL_NOISE**2 + least) / (USUAL_POINTS + count - LEAST_POINTS)
    return [
        LossFit(
            (least[i] - squares[i]) / (2 * variances[i]),
            log_epochs(slopes[i], starts[i], floors[i], math.sqrt(variances[i]), rule),
            count,
        )
        if usable[i].any()
        else None
        for i, (_, rule) in enumerate(histories)
    ]


@functools.cache
def _shares() -> Array:
    """Return the distances of the floors tried from the least loss, relative to it."""
    import numpy as np

    return np.geomspace(1e-3, 1, FLOORS)


def fit_line(epochs: Array, values: Array, weights: Array) -> tuple[Array, Array]:
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


def log_epochs(slopes: Array, starts: Array, floors: Array, noise: float, stop: StopRule) -> Array:
    """Return the logarithms of the epochs until members with these curves have converged.

    A member converges when it reaches the target, or when it improves by at most `min_delta` in `patience`
    epochs: with x = slope * k + start at the last epoch that still improves, x * (x + slope * patience) =
    slope * patience / min_delta. Improvements smaller than the noise of the fit do not count.

    Parameters
    ----------
    slopes, starts, floors : array
        Parameters of the curves 1 / (slope * k + start) + floor, with k in epochs: beta_0 > 0, beta_1 >= 0
        and beta_2 >= 0 of the paper.
    noise : float
        Root mean square of the residuals of the fit, relative to the losses.
    """
    import numpy as np

    least_gains = stop.min_delta or noise * np.where(floors > 0, floors, LEAST_NOISE)
    steps = slopes * stop.patience
    with np.errstate(all="ignore"):  # infinite results become `max_epochs`
        lasts = (np.sqrt(steps * steps + 4 * steps / least_gains) - steps) / 2
        epochs = np.maximum((lasts - starts) / slopes, 0.0) + stop.patience
        if stop.target is not None:
            reached = np.maximum((1 / (stop.target - floors) - starts) / slopes, 1.0)
            epochs = np.where(stop.target > floors, np.fmin(reached, epochs), epochs)
        found: Array = np.log(np.clip(np.fmin(epochs, stop.max_epochs), 1.0, MOST_EPOCHS))
    return found


def predict_epochs(fits: Sequence[LossFit], priors: Sequence[EpochPrior]) -> list[float]:
    """Return the total numbers of epochs of members, each more than are done.

    Each curve of a fit has its number of epochs; the prediction is their mean logarithm, weighted by
    likelihood and by closeness to the member's prior.
    """
    if not fits:
        return []
    import numpy as np

    likelihoods, logs, counts = map(np.array, zip(*fits, strict=True))
    done = counts.astype(float)
    medians, spreads = np.array(priors).T[:, :, None]
    weights = likelihoods - ((logs - np.log(medians)) / spreads) ** 2 / 2
    # Subtracting the largest logarithm keeps exp() from underflowing for all curves of a row.
    weights = np.exp(weights - weights.max(axis=1, keepdims=True))
    weights *= np.exp(logs) > done[:, None]
    total = weights.sum(axis=1)
    usable = total > LEAST_WEIGHT
    means = (weights * logs).sum(axis=1) / np.where(usable, total, 1.0)
    least = done + np.maximum(0.5, 0.03 * done)
    found: list[float] = np.where(usable, np.maximum(np.exp(means), done + 0.5), least).tolist()
    return found


@functools.lru_cache(maxsize=1 << 12)
def epochs_beyond(prior: EpochPrior, done: int) -> float:
    """Return the median of a lognormal prior under the condition that it is more than `done`."""
    if done < 1:
        return prior.epochs
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


class ConvergenceForecast:
    """Total epochs of a run's active members, kept up to date.

    A member whose results cannot be fitted is omitted, unless those of others can and it has no
    `expected_epochs`.

    Attributes
    ----------
    epochs : dict of str to (int, str)
        Total epochs by member, with the source of the prediction.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.epochs: dict[str, tuple[int, str]] = {}
        self._rules = {member.name: member.stop for member in members}
        # Logarithms of epochs, from each member's own results alone.
        self._own_logs: dict[str, float] = {}
        self._others: EpochPrior | None = None
        self._fits: dict[str, LossFit] = {}
        self._unfitted: dict[str, int] = {}

    def edit(self, members: Iterable[Member]) -> None:
        """Go by the present stop rules of members, new ones too, from their next update on."""
        self._rules |= {member.name: member.stop for member in members}

    def update(self, changed: Mapping[str, Progress]) -> set[str]:
        """Update the progress of members; return the members whose predictions have changed."""
        trying = {
            name: losses
            for name, done in changed.items()
            if not done.converged and (losses := _losses(done, self._rules[name]))
        }
        fits = dict(zip(trying, fit_histories([*trying.values()]), strict=True))
        for name, done in changed.items():
            self._store(name, done, fits.get(name))
        others = prior_of(self._own_logs.values())
        moved, self._others = others != self._others, others
        names = {*changed, *self._fits, *self._unfitted} if moved else changed.keys()
        found = self._predicted(names)
        updated = {name for name in names if self.epochs.get(name) != found.get(name)}
        for name in updated:
            self.epochs.pop(name, None)
        self.epochs |= {name: found[name] for name in updated & found.keys()}
        return updated

    def _store(self, name: str, done: Progress, fit: LossFit | None) -> None:
        for known in (self._own_logs, self._fits, self._unfitted):
            known.pop(name, None)
        if done.converged:
            self._own_logs[name] = math.log(max(len(done.epochs), 1))
        elif fit:
            (epochs,) = predict_epochs([fit], [NO_PRIOR])
            self._own_logs[name] = math.log(max(epochs, 1.0))
            if done.active:
                self._fits[name] = fit
        elif done.active and self._rules[name].expected_epochs is None:
            self._unfitted[name] = len(done.epochs)

    def _predicted(self, names: Collection[str]) -> dict[str, tuple[int, str]]:
        fits = {name: self._fits[name] for name in names if name in self._fits}
        predicted = predict_epochs([*fits.values()], [self._prior(name) for name in fits])
        found = {
            name: (epochs, "by its results so far (Capes, Equation 1)")
            for name, epochs in zip(fits, predicted, strict=True)
        }
        if others := self._others:
            unfitted = ((name, self._unfitted[name]) for name in names if name in self._unfitted)
            found |= {name: (epochs_beyond(others, done), "as other members take") for name, done in unfitted}
        return {name: self._in_whole(name, *each) for name, each in found.items()}

    def _prior(self, name: str) -> EpochPrior:
        expected = self._rules[name].expected_epochs
        return EpochPrior(expected, AUTHORS_SPREAD) if expected else self._others or NO_PRIOR

    def _in_whole(self, name: str, epochs: float, how: str) -> tuple[int, str]:
        # The tolerance keeps rounding errors of exp() and log() from adding an epoch.
        count = min(math.ceil(epochs - 1e-6), self._rules[name].max_epochs)
        return count, f"{count} epochs in all {how}"


def _losses(done: Progress, stop: StopRule) -> tuple[list[float], StopRule] | None:
    return errors_as_losses(EpochHistory.of(done.epochs).values(stop.metric), stop)


def prior_of(logs: Collection[float]) -> EpochPrior | None:
    """Return the prior of another member from the logarithms of known epochs; None if they are too few."""
    if len(logs) < LEAST_OTHERS:
        return None
    import numpy as np

    # Sorted, as the sum of floats depends on their order.
    known = np.sort(np.fromiter(logs, float, len(logs)))
    median, deviation = float(np.median(known)), float(known.std(ddof=1))
    # If all others took equally long the spread would be 0, and the prior is divided by it.
    return EpochPrior(math.exp(round(median, PRIOR_DIGITS)), max(round(deviation, PRIOR_DIGITS), 0.1))
