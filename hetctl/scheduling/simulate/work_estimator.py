"""Estimates of the work left in members whose losses are known but not their number of epochs."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import field, replace

from hetctl.model.ensemble import StopRule
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload
from hetctl.perf.convergence import (
    LEAST_POINTS,
    EpochPrior,
    LossFit,
    epochs_beyond,
    fit_histories,
    predict_epochs,
)

NOISE = 0.02
RULE = StopRule(patience=1, min_delta=0.005, max_epochs=10_000)
"""Stop rule of all members: an epoch lowers the loss by no more than `min_delta`."""
FIRST_PRIOR = EpochPrior(30.0, 0.5)
"""Prior of a member's epochs before any losses are known."""
SHARES = (0.1, 0.25, 0.5, 0.75)
EPOCHS_DRAWN = (10, 40)


@dataclass(frozen=True)
class LossCurve:
    """Losses of a member in training, and the rule that ends it.

    Parameters
    ----------
    loss : callable
        Function from the number of a finished epoch to the loss after it, without noise.
    noise : float
        Standard deviation of the losses that are seen, relative to them.
    """

    loss: Callable[[float], float]
    noise: float = NOISE
    rule: StopRule = RULE


LossCurveFamily = Callable[[float, random.Random], LossCurve]
"""Function that draws the curve of a member with these epochs to convergence."""


@dataclass
class SimulatedMember:
    """Loss curve of a simulated member, and its losses observed so far.

    Parameters
    ----------
    samples : float
        Samples to convergence.
    epoch : float
        Samples per epoch.
    predicted : float
        Latest prediction of the total number of epochs.
    errors : dict
        Relative errors of the predicted work, by share of the run.
    """

    samples: float
    epoch: float
    curve: LossCurve
    draw: random.Random
    losses: list[float] = field(default_factory=list)
    fit: LossFit | None = None
    predicted: float = FIRST_PRIOR.epochs
    predicted_from: tuple[int, EpochPrior] | None = None
    errors: dict[float, float] = field(default_factory=dict)

    @property
    def epochs(self) -> float:
        """Epochs to convergence."""
        return self.samples / self.epoch

    def trained(self, workload: Workload) -> float:
        """Return the epochs that are done."""
        return (self.samples - workload.samples_left) / self.epoch

    def observe(self, epochs: int) -> None:
        """Add the losses of newly finished epochs, and fit again if there are any."""
        seen = len(self.losses)
        for epoch in range(seen + 1, epochs + 1):
            self.losses.append(self.curve.loss(epoch) * (1 + self.curve.noise * self.draw.gauss(0, 1)))
        if epochs > seen:
            self.fit = self._fit(epochs)
            self.predict(self.predicted_from[1] if self.predicted_from else FIRST_PRIOR)

    def _fit(self, epochs: int) -> LossFit | None:
        return fit_histories([(self.losses[:epochs], self.curve.rule)])[0]

    def predict(self, prior: EpochPrior) -> None:
        """Predict the total number of epochs, unless neither losses nor prior changed."""
        done = len(self.losses)
        if self.predicted_from != (done, prior):
            self.predicted = _predicted(self.fit, done, prior)
            self.predicted_from = done, prior
            self._note_errors(prior)

    def _note_errors(self, prior: EpochPrior) -> None:
        """Store the prediction's error at each share of the run that is over, from the losses until then."""
        for share in SHARES:
            if share not in self.errors and len(self.losses) >= share * self.epochs:
                seen = int(share * self.epochs)
                predicted = _predicted(self._fit(seen), seen, prior)
                self.errors[share] = abs(predicted - self.epochs) / self.epochs


def _predicted(fit: LossFit | None, done: int, prior: EpochPrior) -> float:
    return predict_epochs([fit], [prior])[0] if fit else epochs_beyond(prior, done)


class WorkEstimator:
    """Function that estimates the work of members from their losses (`scenario.WorkEstimate`).

    Each member's losses follow a curve that is drawn for it, such that its rule holds when its work is
    done; each epoch gives one loss with multiplicative noise. Work left is predicted from the losses of
    finished epochs, and from the predicted epochs of other members that have losses to fit. A member that
    is missing in a call may have converged, train or not have arrived: it keeps its last prediction. A
    member without known epochs gets 10 to 40.

    Parameters
    ----------
    workloads : sequence of Workload
        The members with their true work, before any training.
    curve_family : callable
        Family of the curves. The default is that of the fit, with the noise that the fit expects: it is
        easier to predict than the losses of real networks.
    """

    def __init__(
        self, workloads: Sequence[Workload], seed: int, curve_family: LossCurveFamily | None = None
    ) -> None:
        self._members = {
            c.name: simulated_member(c, random.Random(f"{seed}:{c.name}"), curve_family or equation_1)
            for c in workloads
        }

    def __call__(self, workloads: Sequence[Workload]) -> list[Workload]:
        """Return the members with their predicted remaining work."""
        trained = {c.name: self._members[c.name].trained(c) for c in workloads}
        for name, epochs in trained.items():
            # Finished epochs are a quotient of floats: 2.9999999 are three.
            self._members[name].observe(int(epochs + 1e-9))
        prior = self._prior()
        for name in trained:
            self._members[name].predict(prior)
        seen = []
        for workload in workloads:
            member, done = self._members[workload.name], trained[workload.name]
            seen.append(replace(workload, samples_left=max(member.predicted - done, 0.25) * member.epoch))
        return seen

    def errors(self) -> dict[float, float]:
        """Return the median of |predicted work - work| / work, by share of a member's run."""
        found = {
            share: [m.errors[share] for m in self._members.values() if share in m.errors] for share in SHARES
        }
        return {share: statistics.median(errors) for share, errors in found.items() if errors}

    def _prior(self) -> EpochPrior:
        known = [math.log(member.predicted) for member in self._members.values() if member.fit]
        if len(known) < LEAST_POINTS:
            return FIRST_PRIOR
        spread = min(max(statistics.stdev(known), 0.15), 1.0)
        # Rounded, so that one member's epoch does not change the predictions of all others.
        return EpochPrior(float(f"{math.exp(statistics.fmean(known)):.2g}"), round(spread, 1))


def simulated_member(
    workload: Workload, draw: random.Random, curve_family: LossCurveFamily
) -> SimulatedMember:
    """Return a member whose curve is drawn for its epochs to convergence."""
    epoch = float(workload.samples_per_epoch or workload.samples_left / draw.uniform(*EPOCHS_DRAWN))
    curve = curve_family(max(workload.samples_left / epoch, 1.0), draw)
    return SimulatedMember(workload.samples_left, epoch, curve, draw)


def equation_1(epochs: float, draw: random.Random) -> LossCurve:
    """Return a curve by Equation 1 of Capes et al., whose parameters are drawn."""
    floor, above = draw.uniform(0.3, 1.5), draw.uniform(3.0, 6.0)
    # A curve that starts lower flattens out in fewer epochs, whatever its slope.
    start = 1 / max(above, 2 * RULE.min_delta * (2 * epochs - 1))
    slope = _slope(epochs, start)
    return LossCurve(lambda epoch: 1 / (slope * epoch + start) + floor)


def _slope(epochs: float, start: float) -> float:
    """Return the slope with which `RULE` holds after a number of epochs.

    The loss falls by min_delta in the last one: min_delta * (slope * (epochs - 1) + start) * (slope *
    epochs + start) = slope. Of its two solutions the steeper is a curve that has flattened out.
    """
    gain = RULE.min_delta
    square, linear, constant = (
        gain * epochs * (epochs - 1),
        gain * start * (2 * epochs - 1) - 1,
        gain * start**2,
    )
    # With one epoch the equation is linear.
    if square < 1e-12:
        return -constant / linear
    return (-linear + math.sqrt(linear**2 - 4 * square * constant)) / (2 * square)
