"""Small networks, one per worker, and their training by Levenberg-Marquardt steps with early stopping.

A training is a value: any process can compute it at any time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.balance.step_time import Values
from hetctl.model.values import dataclass

MOST_STEPS, PATIENCE = 20, 3
"""Most training steps, and most steps in a row without a lower held-out error."""
HELD_OUT = 5
"""Ratio of all samples to held-out samples."""
BLOCK = 64
"""Samples multiplied at once: so few that BLAS uses one thread. Other work on the machine would delay
several threads."""
DECAY = 1e-3
"""Weight of the squared weights relative to the mean squared error."""
FIRST_DAMPING, LEAST_DAMPING, SOFTER, HARDER = 1e-1, 1e-7, 0.2, 5.0
"""Initial and least damping, and its factors after a step that lowers the error and one that does not."""

Indices = NDArray[np.int64]

SERIES = SPEED, CPU, MEMORY = range(3)
"""Indices of the series; speed is a logarithm, since slowdowns are factors."""
REMEMBERED = 1024
"""Least number of kept observations; the most is twice that."""
FLAT = 1e-6
"""Share of its mean below which the variation of a series counts as none."""

Lag = tuple[int, int]
"""A series, and the lag in observations."""


def split(weights: Values, shapes: Sequence[tuple[int, ...]]) -> list[Values]:
    """Split weights of shape (workers, parameters) into arrays of shapes (workers, *shape)."""
    parts, end = [], 0
    for shape in shapes:
        start, end = end, end + math.prod(shape)
        parts.append(weights[:, start:end].reshape(len(weights), *shape))
    return parts


def joined(*parts: Values) -> Values:
    """Join derivatives by several arrays, (workers, samples, *shape) each, along the parameters."""
    return np.concatenate([part.reshape(*part.shape[:2], -1) for part in parts], axis=2)


def outer(left: Values, right: Values) -> Values:
    """Return the outer product of `left` and `right` over their last axes."""
    return left[..., :, None] * right[..., None, :]


@dataclass(frozen=True)
class FeedForward:
    """Network with a hidden layer of hyperbolic tangents and a linear output.

    Weights have the shape (workers, parameters), inputs (workers, samples, features).
    """

    features: int
    hidden: int

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the weights and bias of the hidden layer, and of those of the output."""
        return (self.features, self.hidden), (1, self.hidden), (self.hidden, 1), (1, 1)

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return (self.features + 2) * self.hidden + 1

    def outputs(self, weights: Values, inputs: Values) -> Values:
        """Return the outputs, shape (workers, samples)."""
        into, bias, out, out_bias = split(weights, self.shapes)
        outputs: Values = (np.tanh(inputs @ into + bias) @ out + out_bias)[..., 0]
        return outputs

    def jacobian(self, weights: Values, inputs: Values) -> tuple[Values, Values]:
        """Return the outputs and their derivatives by the weights, shape (workers, samples, parameters)."""
        into, bias, out, out_bias = split(weights, self.shapes)
        hidden = np.tanh(inputs @ into + bias)
        slope = (1 - hidden**2) * out.transpose(0, 2, 1)
        derivatives = joined(outer(inputs, slope), slope, hidden, np.ones((*hidden.shape[:2], 1)))
        return (hidden @ out + out_bias)[..., 0], derivatives


class Fitting:
    """Stepwise training of several workers' networks.

    Parameters
    ----------
    weights : array, shape (workers, parameters)
        Initial weights.
    inputs : array, shape (workers, samples, features)
        Features of the samples.
    targets : array, shape (workers, samples)
        Wanted outputs.

    Attributes
    ----------
    best : array, shape (workers, parameters)
        Weights with the least held-out error so far.
    least : array, shape (workers,)
        Their mean squared held-out error.
    """

    def __init__(self, network: FeedForward, weights: Values, inputs: Values, targets: Values) -> None:
        self._network = network
        self._inputs, self._targets = inputs, targets
        self._held_out = np.arange(targets.shape[1]) % HELD_OUT == HELD_OUT - 1
        self._weights = self.best = weights
        self._error, self.least = self._errors(weights)
        self._damping = np.full(len(weights), FIRST_DAMPING)
        self._idle = np.zeros(len(weights), dtype=int)
        self._steps = 0

    @property
    def done(self) -> bool:
        """True if no further steps are useful."""
        return self._steps >= MOST_STEPS or bool((self._idle >= PATIENCE).all())

    def step(self) -> None:
        """Take one step per worker; if it raises the training error, reject it and increase the damping."""
        trial = self._weights + self._change()
        error, held_out = self._errors(trial)
        # False for NaN as well, so that a diverged step is rejected.
        taken = error < self._error
        better = taken & (held_out < self.least)
        self._weights = np.where(taken[:, None], trial, self._weights)
        self._error = np.where(taken, error, self._error)
        self.best = np.where(better[:, None], trial, self.best)
        self.least = np.where(better, held_out, self.least)
        self._damping = np.maximum(self._damping * np.where(taken, SOFTER, HARDER), LEAST_DAMPING)
        self._idle = np.where(better, 0, self._idle + 1)
        self._steps += 1

    def _change(self) -> Values:
        trained = ~self._held_out
        outputs, jacobian = self._network.jacobian(self._weights, self._inputs[:, trained])
        left = self._targets[:, trained] - outputs
        products = _products(np.concatenate([jacobian, left[..., None]], axis=2))
        curvature, slope = products[:, :-1, :-1], products[:, :-1, -1:]
        kept = (DECAY + self._damping)[:, None, None] * np.eye(self._network.parameters)
        change: Values = np.linalg.solve(curvature + kept, slope - DECAY * self._weights[..., None])[..., 0]
        return change

    def _errors(self, weights: Values) -> tuple[Values, Values]:
        """Return the regularised training error and the mean squared held-out error, shape (workers,)."""
        squares = (self._targets - self._network.outputs(weights, self._inputs)) ** 2
        decay = DECAY * (weights**2).sum(axis=1)
        return squares[:, ~self._held_out].mean(axis=1) + decay, squares[:, self._held_out].mean(axis=1)


def _products(columns: Values) -> Values:
    """Return the mean over samples of the products of column pairs, shape (workers, columns, columns)."""
    workers, samples, count = columns.shape
    mean = np.zeros((workers, count, count))
    for start in range(0, samples, BLOCK):
        block = columns[:, start : start + BLOCK]
        mean += (block / samples).transpose(0, 2, 1) @ block
    return mean


class SpeedHistory:
    """Series of observations; the oldest are dropped.

    Attributes
    ----------
    seen : int
        Number of observations so far, the dropped ones included.
    """

    def __init__(self, workers: int) -> None:
        self._values = np.zeros((workers, len(SERIES), 2 * REMEMBERED))
        self._length = 0
        self._sums = np.zeros((2, workers, len(SERIES)))
        self.seen = 0

    def append(self, speed: Values, cpu: Values, memory: Values) -> None:
        """Add an observation; each array has shape (workers,)."""
        if self._length == self._values.shape[2]:
            self._values[..., :REMEMBERED] = self._values[..., REMEMBERED:]
            self._length = REMEMBERED
        newest = np.stack([speed, cpu, memory], axis=1)
        self._values[..., self._length] = newest
        self._sums += np.stack([newest, newest**2])
        self._length += 1
        self.seen += 1

    @property
    def kept(self) -> Values:
        """View of the kept values, the oldest first, shape (workers, series, observations)."""
        return self._values[..., : self._length]

    def usual(self) -> tuple[Values, Values]:
        """Return means and standard deviations, shape (workers, series).

        Mean speeds are per worker. All else is common to all workers, so that a network can use conditions
        that other workers have had.
        """
        mean, square = self._sums / self.seen
        centres = np.broadcast_to(mean.mean(axis=0), mean.shape).copy()
        centres[:, SPEED] = mean[:, SPEED]
        variance = (square - 2 * centres * mean + centres**2).mean(axis=0)
        # Rounding may make a difference of squares negative.
        spread = np.sqrt(np.maximum(variance, 0.0))
        spread = np.where(spread > FLAT * np.abs(centres).max(axis=0), spread, 1.0)
        return centres, np.broadcast_to(spread, mean.shape)


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
    """Training on a sample of the last observations of some workers; any process can compute it.

    Parameters
    ----------
    lags : tuple of Lag
        Features of the network.
    workers : array of int
        Numbers of the workers whose networks are trained.
    models : Models
        Their networks at the start, then those of other workers whose observations the training uses.
    past : array, shape (workers, series, observations)
        Log speed, CPU and memory of the workers in `models`.
    samples : int
        Most observations of a worker in its training set, which has as many of any workers.
    seed : int
        Seed of the sample.
    """

    network: FeedForward
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
    """Return the inputs at some workers' observations, shape (.., features).

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
