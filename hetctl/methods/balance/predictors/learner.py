"""Predictor with a network per worker, trained between the iterations (LB-BSP, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetctl.methods.balance.predictors.averages import Ema
from hetctl.methods.balance.predictors.base import ObservedRange, Values
from hetctl.methods.balance.predictors.fitting import Fitting, SmallNetwork
from hetctl.methods.balance.predictors.speed_history import SPEED, Indices, SpeedHistory

Lag = tuple[int, int]
"""A series, and the lag in observations."""

PREDICTS_FROM = 500
"""Iterations with the moving average before the networks are used (LB-BSP, section 4)."""
LEARNS_FROM = 100
"""Iterations before the first training, so that every worker has a trained network at `PREDICTS_FROM`."""
HORIZON = 100
"""Approximate number of iterations over which prediction errors are averaged."""


@dataclass(frozen=True)
class Effort:
    """Amount of work in one training.

    Parameters
    ----------
    workers : int
        Workers trained at a time.
    samples : int
        Iterations of the worker itself in its training set; as many samples of any workers are added.
    """

    workers: int
    samples: int


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


class Learner:
    """Predictor with one network per worker, and the moving average until enough iterations are known.

    Later, too, the moving average replaces a network as long as its recent errors are smaller, since a
    network cannot predict conditions that no worker has had yet.

    Between two iterations a few workers take one training step. The first training of a worker starts from
    the network of a worker trained before, every further one from its own network.

    Parameters
    ----------
    lags : sequence of Lag
        Features of the networks.
    effort : Effort
        Amount of work in one training.
    models : Models or None
        Networks of an earlier run of these workers, used from the start.
    """

    def __init__(
        self,
        workers: int,
        seed: int,
        network: SmallNetwork,
        lags: Sequence[Lag],
        effort: Effort,
        models: Models | None = None,
    ) -> None:
        self._draw = np.random.default_rng(seed)
        self._network = network
        self._series, self._lags = np.array(lags).T
        self._reach = 1 + int(self._lags.max())
        self._effort = effort
        self._workers = np.arange(workers)
        self._average = Ema(workers)
        self._range = ObservedRange(workers)
        self._history = SpeedHistory(workers)
        self._trained = np.full(workers, models is not None)
        self._predicts_from = PREDICTS_FROM if models is None else self._reach
        self.models = models or self._random(workers)
        self._forecasts = np.zeros((2, workers))
        self._errors = np.zeros((2, workers))
        self._next = 0
        self._training: tuple[Indices, Models, Fitting] | None = None

    def observe(self, speed: Values, cpu: Values, memory: Values) -> None:
        """Add the observation, take one training step, and compute the next forecasts."""
        self._average.observe(speed, cpu, memory)
        logarithm = np.log(speed)
        # A sum that forgets by 1 / HORIZON in each iteration stands for a window without its history.
        self._errors += (self._forecasts - logarithm) ** 2 - self._errors / HORIZON
        self._range.observe(logarithm)
        self._history.append(logarithm, cpu, memory)
        if self._history.seen >= LEARNS_FROM:
            self._train()
        self._forecasts = self._ahead()

    def predict(self) -> Values:
        """Return the forecast of the network or, if its errors were smaller, of the moving average."""
        by_network, by_average = self._errors
        speed: Values = np.exp(np.where(by_network <= by_average, *self._forecasts))
        return speed

    def _ahead(self) -> Values:
        """Return the forecasts of the log speed by the networks and by the moving average."""
        average = np.log(self._average.predict())
        if self._history.seen < self._predicts_from:
            return np.stack([average, average])
        models, all_workers = self.models, self._workers[:, None]
        inputs = self._features(models, all_workers, np.full_like(all_workers, len(self._history) - 1))
        outputs = self._network.outputs(models.weights, inputs)[:, 0]
        network = self._range.clip(models.centres[:, SPEED] + models.spreads[:, SPEED] * outputs)
        return np.stack([np.where(self._trained, network, average), average])

    def _random(self, workers: int) -> Models:
        """Return small random weights, equal for all workers."""
        weights = np.tile(self._draw.normal(0.0, 0.3, self._network.parameters), (workers, 1))
        return Models(weights, np.zeros((workers, 3)), np.ones((workers, 3)))

    def _train(self) -> None:
        if self._training is None:
            self._training = self._start()
        workers, models, fitting = self._training
        fitting.step()
        if fitting.done:
            self._keep(workers, fitting.best, models)
            self._training = None

    def _start(self) -> tuple[Indices, Models, Fitting]:
        """Start the training of the next few workers on a sample of the history."""
        workers = self._workers[self._next : self._next + self._effort.workers]
        self._next = (int(workers[-1]) + 1) % len(self._workers)
        models = Models(self.models.weights[workers], *self._history.usual())
        sampled, rows = self._sample(workers)
        targets = self._history.at(sampled, np.array(SPEED), rows + 1) - models.centres[sampled, SPEED]
        targets /= models.spreads[sampled, SPEED]
        fitting = Fitting(self._network, models.weights, self._features(models, sampled, rows), targets)
        return workers, models, fitting

    def _sample(self, workers: Indices) -> tuple[Indices, Indices]:
        """Draw each worker's training observations: their workers and rows, shape (workers, samples)."""
        first, last = self._reach - 1, len(self._history) - 1
        own = self._draw.choice(
            np.arange(first, last), min(self._effort.samples, last - first), replace=False
        )
        shape = (len(workers), len(own))
        any_worker = self._draw.integers(0, len(self._workers), shape)
        sampled = np.concatenate([np.broadcast_to(workers[:, None], shape), any_worker], axis=1)
        rows = np.concatenate([np.broadcast_to(own, shape), self._draw.integers(first, last, shape)], axis=1)
        return sampled, rows

    def _keep(self, workers: Indices, best: Values, models: Models) -> None:
        """Adopt trained networks; workers without a first training will start from the last of them."""
        weights, centres, spreads = (
            array.copy() for array in (self.models.weights, self.models.centres, self.models.spreads)
        )
        weights[workers] = best
        centres[workers], spreads[workers] = models.centres[workers], models.spreads[workers]
        self._trained[workers] = True
        weights[~self._trained] = best[-1]
        self.models = Models(weights, centres, spreads)

    def _features(self, models: Models, workers: Indices, rows: Indices) -> Values:
        """Return the inputs at given observations of given workers, shape (.., features)."""
        sampled = workers[..., None]
        values = self._history.at(sampled, self._series, rows[..., None] - self._lags)
        scaled: Values = (values - models.centres[sampled, self._series]) / models.spreads[
            sampled, self._series
        ]
        return scaled
