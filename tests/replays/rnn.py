"""A plain recurrent network on the last two speeds (LB-BSP, section 5.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetctl.methods.balance.predictors.learner import Effort, Learner
from hetctl.methods.balance.predictors.network_training import SPEED, Lag, joined, outer, split
from hetctl.methods.balance.step_time import Values

HIDDEN = 4
LAGS: tuple[Lag, ...] = ((SPEED, 1), (SPEED, 0))
"""Features with a look-back of 2, the oldest first, in the order in which the network reads them."""
EFFORT = Effort(workers=1, samples=60)


@dataclass(frozen=True)
class SimpleRnn:
    """Recurrence h_t = tanh(x_t U + h_{t-1} W + b) along the features, linear output of the last state."""

    hidden: int

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of U, W and b, and of the output's weights and bias."""
        return (1, self.hidden), (self.hidden, self.hidden), (1, self.hidden), (self.hidden, 1), (1, 1)

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return (self.hidden + 3) * self.hidden + 1

    def outputs(self, weights: Values, inputs: Values) -> Values:
        """Return the outputs, shape (workers, samples)."""
        *_, out, out_bias = split(weights, self.shapes)
        outputs: Values = (self._states(weights, inputs)[-1] @ out + out_bias)[..., 0]
        return outputs

    def jacobian(self, weights: Values, inputs: Values) -> tuple[Values, Values]:
        """Return the outputs and their derivatives by the weights (back-propagation through time)."""
        _, again, _, out, out_bias = split(weights, self.shapes)
        states = self._states(weights, inputs)
        by_state = np.broadcast_to(out.transpose(0, 2, 1), states[-1].shape)
        into: Values | float = 0.0
        over: Values | float = 0.0
        bias: Values | float = 0.0
        for at in reversed(range(inputs.shape[2])):
            slope = by_state * (1 - states[at + 1] ** 2)
            into = into + inputs[..., at : at + 1] * slope
            over = over + outer(states[at], slope)
            bias = bias + slope
            by_state = slope @ again.transpose(0, 2, 1)
        ones = np.ones((*inputs.shape[:2], 1))
        derivatives = joined(np.asarray(into), np.asarray(over), np.asarray(bias), states[-1], ones)
        return (states[-1] @ out + out_bias)[..., 0], derivatives

    def _states(self, weights: Values, inputs: Values) -> list[Values]:
        """Return h_0 = 0, h_1, .., each of shape (workers, samples, hidden)."""
        into, again, bias, *_ = split(weights, self.shapes)
        states: list[Values] = [np.zeros((*inputs.shape[:2], self.hidden))]
        for at in range(inputs.shape[2]):
            states.append(np.tanh(inputs[..., at : at + 1] * into + states[-1] @ again + bias))
        return states


def rnn(workers: int, seed: int) -> Learner:
    """Return a predictor with plain recurrent networks."""
    return Learner(workers, seed, SimpleRnn(HIDDEN), LAGS, EFFORT)
