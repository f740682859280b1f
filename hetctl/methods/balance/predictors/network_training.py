"""Training of a few workers' networks, as a value: when and where it is computed makes no difference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetctl.methods.balance.predictors.base import Values
from hetctl.methods.balance.predictors.fitting import Fitting, SmallNetwork
from hetctl.methods.balance.predictors.speed_history import SPEED, Indices

Lag = tuple[int, int]
"""A series, and the lag in observations."""


@dataclass(frozen=True)
class Models:
    """Networks of several workers.

    Parameters
    ----------
    weights : array, shape (workers, parameters)
        Weights of the networks.
    centres, spreads : array, shape (workers, 3)
        Offset and scale of the log speed, CPU and memory; network inputs are (value - centre) / spread.
    """

    weights: Values
    centres: Values
    spreads: Values


@dataclass(frozen=True)
class Training:
    """Training on a sample of the last observations of some workers; its pickle can be computed elsewhere.

    Parameters
    ----------
    lags : tuple of Lag
        Features of the network.
    workers : array of int
        Numbers of the workers whose networks are trained.
    models : Models
        Their networks at the start, followed by those of other workers, whose observations are also used.
    past : array, shape (workers, series, observations)
        Log speed, CPU and memory of the workers in `models`.
    samples : int
        Most observations of a worker itself in its training set; as many of any workers are added.
    seed : int
        Seed of the sample.
    """

    network: SmallNetwork
    lags: tuple[Lag, ...]
    workers: Indices
    models: Models
    past: Values
    samples: int
    seed: int

    def fitted(self) -> Values:
        """Return the trained weights, shape (workers, parameters)."""
        seen, rows = self._sample(np.random.default_rng(self.seed))
        inputs = features(self.past, self.lags, self.models, seen, rows)
        targets = self.past[seen, SPEED, rows + 1] - self.models.centres[seen, SPEED]
        targets /= self.models.spreads[seen, SPEED]
        fitting = Fitting(self.network, self.models.weights[: len(self.workers)], inputs, targets)
        while not fitting.done:
            fitting.step()
        return fitting.best

    def _sample(self, draw: np.random.Generator) -> tuple[Indices, Indices]:
        """Draw each worker's training observations: their workers and rows, shape (workers, samples)."""
        first, last = max(lag for _, lag in self.lags), self.past.shape[2] - 1
        own = draw.choice(np.arange(first, last), min(self.samples, last - first), replace=False)
        shape = (len(self.workers), len(own))
        any_worker = draw.integers(0, len(self.past), shape)
        each = np.broadcast_to(np.arange(len(self.workers))[:, None], shape)
        seen = np.concatenate([each, any_worker], axis=1)
        rows = np.concatenate([np.broadcast_to(own, shape), draw.integers(first, last, shape)], axis=1)
        return seen, rows


def features(past: Values, lags: tuple[Lag, ...], models: Models, workers: Indices, rows: Indices) -> Values:
    """Return the inputs at given observations of given workers, shape (.., features).

    Parameters
    ----------
    past : array, shape (workers, series, observations)
        Log speed, CPU and memory of the workers in `models`.
    """
    series, back = np.array(lags).T
    of = workers[..., None]
    values = past[of, series, rows[..., None] - back]
    scaled: Values = (values - models.centres[of, series]) / models.spreads[of, series]
    return scaled
