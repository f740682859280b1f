"""Predictors of speed (LB-BSP, section 3.2.2): last speed, moving average, networks (NARX, Equation 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from hetctl.methods.balance.predictors.network_training import (
    CPU,
    MEMORY,
    REMEMBERED,
    SPEED,
    FeedForward,
    Lag,
    Models,
    SpeedHistory,
    Training,
    features,
)
from hetctl.methods.balance.step_time import Values
from hetctl.model.errors import BadInputError
from hetctl.model.values import dataclass


class Predictor(Protocol):
    """Predictor of each worker's speed in the next iteration.

    Between two iterations, `observe` is called first and `predict` second.
    """

    def observe(self, speed: Values, cpu: Values, memory: Values) -> None:
        """Add the observations before iteration k, arrays of shape (workers,).

        Parameters
        ----------
        speed : array
            Speed in the last iteration, v^{k-1}, in samples/s, above 0.
        cpu, memory : array
            Present values c^k and m^k, in a unit common to all workers; all equal if not measured.
        """

    def predict(self) -> Values:
        """Return v^k in samples/s, above 0, shape (workers,).

        Predictions stay within the range of the worker's past speeds. Before the first observation they are
        1.
        """


class ObservedRange:
    """Range of each worker's values so far."""

    def __init__(self, workers: int) -> None:
        self.lowest = np.full(workers, np.inf)
        self.highest = np.full(workers, -np.inf)

    def observe(self, values: Values) -> None:
        """Extend the range to these values."""
        np.minimum(self.lowest, values, out=self.lowest)
        np.maximum(self.highest, values, out=self.highest)

    def clip(self, values: Values) -> Values:
        """Return the values clipped to the range; NaN becomes the lowest."""
        # Unlike minimum and maximum, fmin and fmax return the other operand for NaN.
        return np.fmin(np.fmax(values, self.lowest), self.highest)


ALPHA = 0.2
"""Weight of the latest observation (LB-BSP, Table 3)."""


class Memoryless:
    """Predictor of an unchanged speed."""

    def __init__(self, workers: int) -> None:
        self._speed = np.ones(workers)

    def observe(self, speed: Values, _cpu: Values, _memory: Values) -> None:
        """Store the last speed."""
        self._speed = speed.copy()

    def predict(self) -> Values:
        """Return the last speed."""
        return self._speed.copy()


class Ema:
    """Predictor of the moving average; the first observation has full weight."""

    def __init__(self, workers: int) -> None:
        self._average = np.ones(workers)
        self._started = False

    def observe(self, speed: Values, _cpu: Values, _memory: Values) -> None:
        """Update the average with the last speed."""
        weight = ALPHA if self._started else 1.0
        self._average += weight * (speed - self._average)
        self._started = True

    def predict(self) -> Values:
        """Return the average."""
        return self._average.copy()


PREDICTS_FROM = 500
"""Iterations with the moving average, before the networks predict (LB-BSP, section 4)."""
LEARNS_FROM = 100
"""Iterations before the first training; every worker then has a trained network at `PREDICTS_FROM`."""
TRAINS_EVERY = 10
"""Least iterations between the starts of two trainings."""
OTHERS = 12
"""Other workers whose observations a training uses: few, since copying delays an iteration."""
HORIZON = 100
"""Approximate number of iterations that prediction errors average over."""


@dataclass(frozen=True)
class Effort:
    """Amount of work in one training.

    Parameters
    ----------
    workers : int
        Workers trained at a time.
    samples : int
        Iterations of the worker in its training set, which has as many samples of any workers.
    """

    workers: int
    samples: int


class Learner:
    """Predictor with one network per worker, and with the moving average until enough iterations are known.

    Later the moving average replaces a network as long as its recent errors are smaller: a network cannot
    predict conditions that no worker has had yet.

    The networks of a few workers are trained at a time. The owner computes `training`, at once with `train`
    or in the background, and passes the result to `adopt`. A worker's first training starts from another
    worker's trained network, later ones from its own.

    Parameters
    ----------
    lags : tuple of Lag
        Features of the networks.
    effort : Effort
        Amount of work in one training.

    Attributes
    ----------
    training : Training or None
        Training that waits for its result; None until the next is due.
    """

    def __init__(
        self,
        workers: int,
        seed: int,
        network: FeedForward,
        lags: tuple[Lag, ...],
        effort: Effort,
    ) -> None:
        self._draw = np.random.default_rng(seed)
        self._network = network
        self._lags = lags
        self._effort = effort
        self._workers = np.arange(workers)
        self._average = Ema(workers)
        self._range = ObservedRange(workers)
        self._history = SpeedHistory(workers)
        self._trained = np.zeros(workers, dtype=bool)
        self.models = self._random(workers)
        self._forecasts = np.zeros((2, workers))
        self._errors = np.zeros((2, workers))
        self._next = 0
        self._trains_from = LEARNS_FROM
        self.training: Training | None = None

    def observe(self, speed: Values, cpu: Values, memory: Values) -> None:
        """Add the observation, compute the next forecasts, and prepare a training if one is due."""
        self._average.observe(speed, cpu, memory)
        logarithm = np.log(speed)
        # A sum that forgets 1 / HORIZON per iteration replaces a window, and needs no history.
        self._errors += (self._forecasts - logarithm) ** 2 - self._errors / HORIZON
        self._range.observe(logarithm)
        self._history.append(logarithm, cpu, memory)
        self._forecasts = self._ahead()
        if self.training is None and self._history.seen >= self._trains_from:
            self._trains_from = self._history.seen + TRAINS_EVERY
            self.training = self._next_training()

    def predict(self) -> Values:
        """Return the network's forecast, or the moving average if its errors were smaller."""
        by_network, by_average = self._errors
        speed: Values = np.exp(np.where(by_network <= by_average, *self._forecasts))
        return speed

    def train(self) -> None:
        """Compute the waiting training, if any."""
        if self.training is not None:
            self.adopt(self.training.fitted())

    def adopt(self, best: Values) -> None:
        """Use the result of `training`; untrained workers will start from the last of its networks.

        Parameters
        ----------
        best : array
            Weights, shape (workers, parameters) or (workers * parameters,).

        Raises
        ------
        BadInputError
            If no training waits for this number of weights.
        """
        training = self.training
        if training is None or best.size != len(training.workers) * self._network.parameters:
            raise BadInputError(f"no training waits for {best.size} weights")
        workers, count = training.workers, len(training.workers)
        best = best.reshape(count, -1)
        weights, centres, spreads = (
            array.copy() for array in (self.models.weights, self.models.centres, self.models.spreads)
        )
        weights[workers] = best
        centres[workers], spreads[workers] = training.models.centres[:count], training.models.spreads[:count]
        self._trained[workers] = True
        weights[~self._trained] = best[-1]
        self.models = Models(weights, centres, spreads)
        self.training = None

    def _ahead(self) -> Values:
        """Return the networks' and the moving average's forecasts of the log speed."""
        average = np.log(self._average.predict())
        if self._history.seen < PREDICTS_FROM:
            return np.stack([average, average])
        models, all_workers = self.models, self._workers[:, None]
        kept = self._history.kept
        newest = np.full_like(all_workers, kept.shape[2] - 1)
        inputs = features(kept, self._lags, models, all_workers, newest)
        outputs = self._network.outputs(models.weights, inputs)[:, 0]
        network = self._range.clip(models.centres[:, SPEED] + models.spreads[:, SPEED] * outputs)
        return np.stack([np.where(self._trained, network, average), average])

    def _random(self, workers: int) -> Models:
        """Return small random weights, equal for all workers."""
        weights = np.tile(self._draw.normal(0.0, 0.3, self._network.parameters), (workers, 1))
        return Models(weights, np.zeros((workers, 3)), np.ones((workers, 3)))

    def _next_training(self) -> Training:
        """Return the training of the next few workers, on their observations and those of some others."""
        workers = self._workers[self._next : self._next + self._effort.workers]
        self._next = (int(workers[-1]) + 1) % len(self._workers)
        others = self._draw.permutation(np.delete(self._workers, workers))[:OTHERS]
        seen = np.concatenate([workers, others])
        centres, spreads = self._history.usual()
        return Training(
            self._network,
            self._lags,
            workers,
            Models(self.models.weights[seen], centres[seen], spreads[seen]),
            self._history.kept[seen, :, -REMEMBERED:],
            self._effort.samples,
            int(self._draw.integers(2**32)),
        )


HIDDEN = 5
LOOK_BACK = 2
"""Window lengths d_v, d_c and d_m."""
EFFORT = Effort(workers=4, samples=400)

LAGS: tuple[Lag, ...] = (
    *((SPEED, lag) for lag in range(LOOK_BACK)),
    *((CPU, lag) for lag in range(LOOK_BACK + 1)),
    *((MEMORY, lag) for lag in range(LOOK_BACK + 1)),
)
"""v^{k-1} .. v^{k-d_v}, c^k .. c^{k-d_c} and m^k .. m^{k-d_m}."""


def narx(workers: int, seed: int) -> Learner:
    """Return a predictor by Equation 4."""
    network = FeedForward(len(LAGS), HIDDEN)
    return Learner(workers, seed, network, LAGS, EFFORT)


PREDICTORS: dict[str, Callable[[int, int], Predictor]] = {
    "memoryless": lambda workers, _: Memoryless(workers),
    "narx": narx,
}
"""Constructors of predictors by name; arguments are the number of workers and a seed."""
