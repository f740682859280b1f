"""BSP iterations of unlike workers under a virtual clock, while a manager balances their batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetctl.methods.balance.manager import FULL_MEMORY, BatchSizeManager, Observation, equal_batches
from hetctl.methods.balance.step_time import TimeCurve, balance_time, balanced

REACHED = 1.05
"""An iteration that takes at most so many times t* is balanced."""
STEADY = 0.25
"""The last quarter of a phase is its steady state."""


@dataclass(frozen=True)
class Conditions:
    """What batches take from an iteration on.

    Parameters
    ----------
    first : int
        That iteration, counted from 0.
    curves : tuple of TimeCurve
        By worker; t_i of LB-BSP, Equation 3: computation and communication together.
    """

    first: int
    curves: tuple[TimeCurve, ...]


@dataclass(frozen=True)
class Iteration:
    """One iteration, from its start on the virtual clock until the slowest worker is done.

    Parameters
    ----------
    expected_s : float
        What it would have taken without jitter.
    batches : tuple of int
        By worker, as `worker_seconds`.
    """

    start_s: float
    seconds: float
    expected_s: float
    batches: tuple[int, ...]
    worker_seconds: tuple[float, ...]


@dataclass(frozen=True)
class ConditionSpan:
    """The iterations under one set of conditions beside their limit, all without jitter.

    Parameters
    ----------
    first, last : int
        Its iterations.
    t_star_s : float
        min t : sum_i Gamma_i^-1(t) >= B. No split takes less, not even with parts of samples.
    best_s, best_batches
        The best split into whole samples.
    equal_s : float
        What equal batches take, as in BSP.
    steady_s : float
        Mean over the last quarter.
    ratio : float
        `steady_s` over `t_star_s`; 1.0 is the limit.
    reached_at : int or None
        The first iteration of at most 1.05 `t_star_s`.
    """

    first: int
    last: int
    t_star_s: float
    best_s: float
    best_batches: tuple[int, ...]
    equal_s: float
    steady_s: float
    ratio: float
    reached_at: int | None


def iterate(
    manager: BatchSizeManager,
    conditions: Sequence[Conditions],
    iterations: int,
    jitter: float = 0.0,
    seed: int = 0,
) -> Iterator[Iteration]:
    """Let a manager choose the batches of so many iterations (LB-BSP, Algorithm 3).

    Parameters
    ----------
    conditions : sequence of Conditions
        In the order in which they come; the first ones hold from iteration 0 on.
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


def phases(iterations: Sequence[Iteration], conditions: Sequence[Conditions]) -> tuple[ConditionSpan, ...]:
    """Hold what iterations took under each set of conditions against the limit."""
    ends = [*(later.first for later in conditions[1:]), len(iterations)]
    return tuple(_phase(iterations[one.first : end], one) for one, end in zip(conditions, ends, strict=True))


def _seen(curve: TimeCurve, batch: int, seconds: float) -> Observation:
    """Say what a worker would: its memory fills in proportion, and the cap leaves 5 % free."""
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
