"""NARX: a network with one hidden layer on past speed, CPU and memory (LB-BSP, Equation 4, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetctl.methods.balance.predictors.base import Values
from hetctl.methods.balance.predictors.learner import Effort, Learner
from hetctl.methods.balance.predictors.network_training import (
    CPU,
    MEMORY,
    SPEED,
    Lag,
    joined,
    outer,
    split,
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


@dataclass(frozen=True)
class FeedForward:
    """Network with one hidden layer of hyperbolic tangents and a linear output."""

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
        """Return the outputs and their derivatives by the weights."""
        into, bias, out, out_bias = split(weights, self.shapes)
        hidden = np.tanh(inputs @ into + bias)
        slope = (1 - hidden**2) * out.transpose(0, 2, 1)
        derivatives = joined(outer(inputs, slope), slope, hidden, np.ones((*hidden.shape[:2], 1)))
        return (hidden @ out + out_bias)[..., 0], derivatives


def narx(workers: int, seed: int) -> Learner:
    """Return a predictor by Equation 4."""
    network = FeedForward(len(LAGS), HIDDEN)
    return Learner(workers, seed, network, LAGS, EFFORT)
