"""Simulation of BSP iterations on different workers with balanced batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hetctl.methods.balance.manager import FULL_MEMORY, BatchSizeManager, Observation, equal_batches
from hetctl.methods.balance.step_time import TimeCurve, balance_time, balanced
from hetctl.model.simulation import ConditionSpan, Iteration
from hetctl.model.values import dataclass

REACHED = 1.05
"""Largest ratio to t* of a balanced iteration."""
STEADY = 0.25
"""Last share of a phase that counts as its steady state."""


@dataclass(frozen=True)
class Conditions:
    """Time curves of the workers from some iteration on.

    Parameters
    ----------
    first : int
        First iteration with these curves, counted from 0.
    curves : tuple of TimeCurve
        Curves by worker: t_i of LB-BSP, Equation 3, computation and communication together.
    """

    first: int
    curves: tuple[TimeCurve, ...]


def iterate(
    manager: BatchSizeManager,
    conditions: Sequence[Conditions],
    iterations: int,
    jitter: float = 0.0,
    seed: int = 0,
) -> Iterator[Iteration]:
    """Yield simulated iterations whose batches a manager chooses (LB-BSP, Algorithm 3).

    Parameters
    ----------
    conditions : sequence of Conditions
        Conditions in chronological order; the first must hold from iteration 0 on.
    jitter : float
        Standard deviation of the logarithm of each worker's time.
    """
    draw = np.random.default_rng(seed)
    clock_s = 0.0
    for number in range(iterations):
        curves = next(one.curves for one in reversed(conditions) if one.first <= number)
        batches = manager.batches
        expected_s = [curve.seconds(batch) for curve, batch in zip(curves, batches, strict=True)]
        taken_s = tuple((np.array(expected_s) * np.exp(jitter * draw.standard_normal(len(curves)))).tolist())
        yield Iteration(clock_s, max(taken_s), max(expected_s), batches, taken_s)
        clock_s += max(taken_s)
        manager.update([_seen(*worker) for worker in zip(curves, batches, taken_s, strict=True)])
        if manager.learner is not None:
            manager.learner.train()


def phases(iterations: Sequence[Iteration], conditions: Sequence[Conditions]) -> tuple[ConditionSpan, ...]:
    """Compare the iterations with their limit, for each set of conditions."""
    ends = [*(later.first for later in conditions[1:]), len(iterations)]
    return tuple(_phase(iterations[one.first : end], one) for one, end in zip(conditions, ends, strict=True))


def _seen(curve: TimeCurve, batch: int, seconds: float) -> Observation:
    """Return a worker's observation; memory grows in proportion, and the cap leaves 5 % free."""
    return Observation(batch, seconds, memory=FULL_MEMORY * batch / curve.cap if curve.cap else 0.0)


def _phase(iterations: Sequence[Iteration], conditions: Conditions) -> ConditionSpan:
    curves, total = conditions.curves, sum(iterations[0].batches)
    t_star_s, best = balance_time(curves, total), balanced(curves, total)
    steady = [one.expected_s for one in iterations[-max(1, int(STEADY * len(iterations))) :]]
    steady_s = sum(steady) / len(steady)
    reached = (
        i for i, one in enumerate(iterations, conditions.first) if one.expected_s <= REACHED * t_star_s
    )
    return ConditionSpan(
        first=conditions.first,
        last=conditions.first + len(iterations) - 1,
        t_star_s=t_star_s,
        best_s=_slowest_s(curves, best),
        best_batches=best,
        equal_s=_slowest_s(curves, equal_batches(total, [curve.cap for curve in curves])),
        steady_s=steady_s,
        ratio=steady_s / t_star_s,
        reached_at=next(reached, None),
    )


def _slowest_s(curves: Sequence[TimeCurve], batches: Sequence[int]) -> float:
    return max(curve.seconds(batch) for curve, batch in zip(curves, batches, strict=True))
