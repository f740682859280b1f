"""LB-BSP's Table 3 replayed: what predictors are told."""

from __future__ import annotations

import numpy as np
import predictor_bench

from hetctl.methods.balance.step_time import Values


class Told:
    """A predictor that keeps what it observes."""

    def __init__(self) -> None:
        self.observed: list[tuple[float, float, float]] = []

    def observe(self, speed: Values, cpu: Values, memory: Values) -> None:
        self.observed.append((float(speed[0]), float(cpu[0]), float(memory[0])))

    def predict(self) -> Values:
        return np.ones(2)


def test_predictors_are_told_nothing_of_the_iteration_to_come(monkeypatch) -> None:
    monkeypatch.setattr(predictor_bench, "FIRST", 0)
    numbers = np.repeat(np.arange(1.0, 6.0)[:, None], 2, axis=1)
    predictor = Told()
    predictor_bench.replayed(predictor_bench.Trace(numbers, numbers, numbers), predictor)
    # Iterations 2 to 5 are predicted, each from the one before it.
    assert predictor.observed == [(k, k, k) for k in (1.0, 2.0, 3.0, 4.0)]
