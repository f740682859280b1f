"""LSTM network on the last two speeds (LB-BSP, section 5.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from replays.rnn import EFFORT, LAGS

from hetctl.methods.balance.predictors.learner import Learner
from hetctl.methods.balance.predictors.network_training import joined, outer, split
from hetctl.methods.balance.step_time import Values

HIDDEN = 3


@dataclass(frozen=True)
class _CellStep:
    """Intermediate results of one time step, kept for back-propagation.

    Parameters
    ----------
    tanh : array, shape (workers, samples, 4 * hidden)
        Hyperbolic tangents of the gates' scaled arguments (see `Lstm.squash`).
    gates : array, shape (workers, samples, 4 * hidden)
        The gates themselves.
    before, cell_tanh, state : array, shape (workers, samples, hidden)
        Previous cell, hyperbolic tangent of the new cell, and new state.
    """

    tanh: Values
    gates: Values
    before: Values
    cell_tanh: Values
    state: Values


@dataclass(frozen=True)
class Lstm:
    """Recurrence of Hochreiter and Schmidhuber along the features, with a linear output of the last state."""

    hidden: int

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the gates' weights (of the input, of the state, bias) and of the output's weights."""
        return (
            (1, 4 * self.hidden),
            (self.hidden, 4 * self.hidden),
            (1, 4 * self.hidden),
            (self.hidden, 1),
            (1, 1),
        )

    @property
    def squash(self) -> Values:
        """Array q with gates = q tanh(q z) + 1 - q: three sigmoids and the candidate's tanh."""
        # sigmoid(z) = tanh(z / 2) / 2 + 1 / 2: all four gates then take one call of tanh.
        return np.repeat([0.5, 1.0], [3 * self.hidden, self.hidden])

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return 4 * self.hidden * (self.hidden + 2) + self.hidden + 1

    def outputs(self, weights: Values, inputs: Values) -> Values:
        """Return the outputs, shape (workers, samples)."""
        *_, out, out_bias = split(weights, self.shapes)
        outputs: Values = (self._steps(weights, inputs)[-1].state @ out + out_bias)[..., 0]
        return outputs

    def jacobian(self, weights: Values, inputs: Values) -> tuple[Values, Values]:
        """Return the outputs and their derivatives by the weights (back-propagation through time)."""
        _, again, _, out, out_bias = split(weights, self.shapes)
        steps = self._steps(weights, inputs)
        state = steps[-1].state
        by_state: Values = np.broadcast_to(out.transpose(0, 2, 1), state.shape)
        by_cell: Values = np.zeros_like(state)
        into = over = bias = np.zeros(1)
        for at in reversed(range(inputs.shape[2])):
            slope, by_cell = self._back(steps[at], by_state, by_cell)
            earlier = steps[at - 1].state if at else np.zeros_like(state)
            into = into + inputs[..., at : at + 1] * slope
            over = over + outer(earlier, slope)
            bias = bias + slope
            by_state = slope @ again.transpose(0, 2, 1)
        derivatives = joined(into, over, bias, state, np.ones((*inputs.shape[:2], 1)))
        return (state @ out + out_bias)[..., 0], derivatives

    def _steps(self, weights: Values, inputs: Values) -> list[_CellStep]:
        into, again, bias, *_ = split(weights, self.shapes)
        state = cell = np.zeros((*inputs.shape[:2], self.hidden))
        squash = self.squash
        steps = []
        for at in range(inputs.shape[2]):
            tanh = np.tanh((inputs[..., at : at + 1] * into + state @ again + bias) * squash)
            gates = squash * tanh + (1 - squash)
            admit, keep, show, candidate = self._four(gates)
            before, cell = cell, keep * cell + admit * candidate
            cell_tanh = np.tanh(cell)
            state = show * cell_tanh
            steps.append(_CellStep(tanh, gates, before, cell_tanh, state))
        return steps

    def _four(self, gates: Values) -> list[Values]:
        return [gates[..., at : at + self.hidden] for at in range(0, 4 * self.hidden, self.hidden)]

    def _back(self, step: _CellStep, by_state: Values, by_cell: Values) -> tuple[Values, Values]:
        """Return the derivatives by the gates' arguments and by the previous cell."""
        admit, keep, show, candidate = self._four(step.gates)
        by_cell = by_cell + by_state * show * (1 - step.cell_tanh**2)
        by_gates = (by_cell * candidate, by_cell * step.before, by_state * step.cell_tanh, by_cell * admit)
        slope = np.concatenate(by_gates, axis=2) * (1 - step.tanh**2) * self.squash**2
        return slope, by_cell * keep


def lstm(workers: int, seed: int) -> Learner:
    """Return a predictor with LSTM networks."""
    return Learner(workers, seed, Lstm(HIDDEN), LAGS, EFFORT)
