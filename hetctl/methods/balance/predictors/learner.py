"""A network per worker, trained in turn between the iterations (LB-BSP, section 4, online training)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetctl.methods.balance.predictors.base import ObservedRange, Values
from hetctl.methods.balance.predictors.ema import Ema
from hetctl.methods.balance.predictors.fitting import Fitting, SmallNetwork
from hetctl.methods.balance.predictors.speed_history import SPEED, Numbers, SpeedHistory

Lag = tuple[int, int]
"""A series, and how many observations it is back."""

PREDICTS_FROM = 500
"""Iterations with the moving average before networks predict (LB-BSP, section 4)."""
LEARNS_FROM = 100
"""Iterations before the first training, so that every worker has its network when they are to predict."""
HORIZON = 100
"""Iterations over which errors are remembered, about."""


@dataclass(frozen=True)
class Effort:
    """How much a training step takes on.

    Parameters
    ----------
    workers : int
        That are trained at a time.
    samples : int
        Iterations of its own that a worker's training sees, and as many of any workers.
    """

    workers: int
    samples: int


@dataclass(frozen=True)
class Models:
    """The networks of several workers.

    Parameters
    ----------
    weights : array, shape (workers, parameters)
    centres, spreads : array, shape (workers, 3)
        Of the logarithm of speed, CPU and memory, which networks see less the one and over the other.
    """

    weights: Values
    centres: Values
    spreads: Values


class Learner:
    """Predicts by one network per worker; by the moving average until there are enough iterations.

    After that, too, the moving average stands in for a network as long as it has erred less of late: a
    network knows nothing of conditions that no worker has met yet.

    Between two iterations a few workers take one training step. A worker's first training starts from
    the network of a worker trained before, every other from its own.

    Parameters
    ----------
    lags : sequence of Lag
        The network's features.
    effort : Effort
        Of the training step between two iterations.
    models : Models or None
        Networks of a former run of these workers, which predict from the start.
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
        self._everyone = np.arange(workers)
        self._average = Ema(workers)
        self._range = ObservedRange(workers)
        self._history = SpeedHistory(workers)
        self._trained = np.full(workers, models is not None)
        self._predicts_from = PREDICTS_FROM if models is None else self._reach
        self.models = models or self._random(workers)
        self._forecasts = np.zeros((2, workers))
        self._errors = np.zeros((2, workers))
        self._next = 0
        self._training: tuple[Numbers, Models, Fitting] | None = None

    def observe(self, speed: Values, cpu: Values, memory: Values) -> None:
        """Remember what was seen, take one training step, and look ahead."""
        self._average.observe(speed, cpu, memory)
        logarithm = np.log(speed)
        self._errors += (self._forecasts - logarithm) ** 2 - self._errors / HORIZON
        self._range.observe(logarithm)
        self._history.append(logarithm, cpu, memory)
        if self._history.seen >= LEARNS_FROM:
            self._train()
        self._forecasts = self._ahead()

    def predict(self) -> Values:
        """Return what the networks say, or the moving average where it has erred less."""
        by_network, by_average = self._errors
        speed: Values = np.exp(np.where(by_network <= by_average, *self._forecasts))
        return speed

    def _ahead(self) -> Values:
        """Return the logarithms of speed that the networks expect, and those of the moving average."""
        average = np.log(self._average.predict())
        if self._history.seen < self._predicts_from:
            return np.stack([average, average])
        models, everyone = self.models, self._everyone[:, None]
        inputs = self._features(models, everyone, np.full_like(everyone, len(self._history) - 1))
        outputs = self._network.outputs(models.weights, inputs)[:, 0]
        network = self._range.clip(models.centres[:, SPEED] + models.spreads[:, SPEED] * outputs)
        return np.stack([np.where(self._trained, network, average), average])

    def _random(self, workers: int) -> Models:
        """Return small random weights, the same for all workers."""
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

    def _start(self) -> tuple[Numbers, Models, Fitting]:
        """Begin to train the next few workers on a sample of what is remembered."""
        workers = self._everyone[self._next : self._next + self._effort.workers]
        self._next = (int(workers[-1]) + 1) % len(self._everyone)
        models = Models(self.models.weights[workers], *self._history.usual())
        whose, rows = self._sample(workers)
        targets = self._history.at(whose, np.array(SPEED), rows + 1) - models.centres[whose, SPEED]
        targets /= models.spreads[whose, SPEED]
        fitting = Fitting(self._network, models.weights, self._features(models, whose, rows), targets)
        return workers, models, fitting

    def _sample(self, workers: Numbers) -> tuple[Numbers, Numbers]:
        """Draw whose observations each of these workers is trained on, and which: (workers, samples)."""
        first, last = self._reach - 1, len(self._history) - 1
        own = self._draw.choice(
            np.arange(first, last), min(self._effort.samples, last - first), replace=False
        )
        shape = (len(workers), len(own))
        anyone = self._draw.integers(0, len(self._everyone), shape)
        whose = np.concatenate([np.broadcast_to(workers[:, None], shape), anyone], axis=1)
        rows = np.concatenate([np.broadcast_to(own, shape), self._draw.integers(first, last, shape)], axis=1)
        return whose, rows

    def _keep(self, workers: Numbers, best: Values, models: Models) -> None:
        """Use the trained networks; workers that wait for their first training start from the last one."""
        weights, centres, spreads = (
            array.copy() for array in (self.models.weights, self.models.centres, self.models.spreads)
        )
        weights[workers] = best
        centres[workers], spreads[workers] = models.centres[workers], models.spreads[workers]
        self._trained[workers] = True
        weights[~self._trained] = best[-1]
        self.models = Models(weights, centres, spreads)

    def _features(self, models: Models, workers: Numbers, rows: Numbers) -> Values:
        """Return the inputs at some observations of some workers, (.., features), as they were known then."""
        whose = workers[..., None]
        values = self._history.at(whose, self._series, rows[..., None] - self._lags)
        scaled: Values = (values - models.centres[whose, self._series]) / models.spreads[whose, self._series]
        return scaled
