"""Small networks, one per worker, trained together by Levenberg-Marquardt steps with early stopping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hetctl.methods.balance.predictors.base import Values

MOST_STEPS, PATIENCE = 20, 3
"""Most training steps, and most consecutive steps without a lower held-out error."""
HELD_OUT = 5
"""Ratio of all samples to held-out samples."""
BLOCK = 64
"""Samples multiplied at once: few enough that BLAS uses a single thread, since several threads would be
delayed by other computations on the machine.
"""
DECAY = 1e-3
"""Weight of the squared weights relative to the mean squared error."""
FIRST_DAMPING, LEAST_DAMPING, SOFTER, HARDER = 1e-1, 1e-7, 0.2, 5.0
"""Initial and least damping, and its factor after a step that lowers the error and one that does not."""


class SmallNetwork(Protocol):
    """A function with weights and a single output.

    Weights have the shape (workers, parameters), inputs (workers, samples, features).
    """

    @property
    def parameters(self) -> int:
        """Number of weights."""

    def outputs(self, weights: Values, inputs: Values) -> Values:
        """Return the outputs, shape (workers, samples)."""

    def jacobian(self, weights: Values, inputs: Values) -> tuple[Values, Values]:
        """Return the outputs and their derivatives by the weights, shape (workers, samples, parameters)."""


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

    def __init__(self, network: SmallNetwork, weights: Values, inputs: Values, targets: Values) -> None:
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
        """Take one step per worker; one that raises the training error is rejected and damping increased."""
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
