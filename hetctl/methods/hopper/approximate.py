"""`approximate`: open shop schedules by vector rearrangement (CEREBRO, section 4.2).

The method is that of Fiala (1983) based on the lemma of Steinitz; Woeginger (2018) summarises it. All
workers are given equal loads, and the configurations are ordered such that no worker gets far ahead of
another. The workers then process that order on a circle as long as the load, each shifted against the
previous one; where the circle is cut, a unit ends on every worker.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.hopper.list_schedule import Indices, Residual, dispatch
from hetctl.methods.hopper.schedule import PRECISION, Place, Schedule, SearchOptions, UnitTimes, in_sequence

Matrix = NDArray[np.float64]
TINY = float(np.finfo(np.float64).tiny)


def approximate(units: UnitTimes, _options: SearchOptions) -> Schedule:
    """Return the schedule of the rearrangement method.

    Its makespan is L_max (Equation 3) if the circle has room for it, which is certain from
    L_max >= (p^2 + p - 1) T_max on (section 4.2). Otherwise the order on the circle is the priority list of a
    dense schedule with a makespan of at most L_max + (p - 1) T_max: the worker that ends last is idle only
    while its last configuration is trained at the other p - 1 workers.

    Raises
    ------
    BadInputError
        If partitions have replicas: the method applies to open shops only (section 4.5).
    """
    matrix = units.matrix
    level = _levelled(matrix)
    order = _order(level)
    starts, has_room = _circle(level[order])
    numbers = order[:, None] * matrix.shape[1] + np.arange(matrix.shape[1])
    # lexsort sorts by its last key first: starts, and among equal starts the shorter unit.
    priorities = numbers.ravel()[np.lexsort((matrix[order].ravel(), starts.ravel()))]
    if has_room:
        return in_sequence(units, _places(priorities, units))
    rank = np.empty_like(priorities)
    rank[priorities] = np.arange(len(priorities))

    def first_on_circle(_worker: int, ready: Indices) -> int:
        return int(ready[rank[ready].argmin()])

    return dispatch(Residual.whole(units), first_on_circle)


def _places(numbers: Indices, units: UnitTimes) -> list[Place]:
    configs, partitions = np.divmod(numbers, len(units.partitions))
    workers = units.homes[partitions]
    return list(zip(configs.tolist(), partitions.tolist(), workers.tolist(), strict=True))


def _levelled(matrix: Matrix) -> Matrix:
    """Lengthen units to at most T_max (Equation 4) such that all workers have the load L_max."""
    loads = matrix.sum(axis=0)
    room = matrix.max() - matrix
    before = np.cumsum(room, axis=0) - room
    return np.asarray(matrix + np.clip(loads.max() - loads - before, 0, room))


def _order(matrix: Matrix) -> Indices:
    """Return an order of the rows with the bound of `rearranged`: a fast greedy one if it meets the bound."""
    order = greedy(matrix)
    is_close = apart(matrix[order]) <= (matrix.shape[1] - 1) * matrix.max()
    # The proof's order takes a linear programme for each configuration: it is made only where it is needed.
    return order if is_close else rearranged(matrix)


def apart(matrix: Matrix) -> float:
    """Return the largest difference of load between workers that process the rows one by one."""
    return float(np.ptp(np.cumsum(matrix, axis=0), axis=1).max())


def greedy(matrix: Matrix) -> Indices:
    """Return an order of the rows in which each next row keeps the column sums closest together."""
    left = np.arange(len(matrix))
    order: list[int] = []
    done = np.zeros(matrix.shape[1])
    while len(left):
        closest = int(np.ptp(done + matrix[left], axis=1).argmin())
        order.append(int(left[closest]))
        done += matrix[left[closest]]
        left = np.delete(left, closest)
    return np.array(order, dtype=np.intp)


def rearranged(matrix: Matrix) -> Indices:
    """Return an order of the rows in which workers are at most (p - 1) T_max `apart`.

    Parameters
    ----------
    matrix : array of shape (configs, partitions)
        Matrix whose columns all have the same sum.

    Notes
    -----
    This is Grinberg and Sevastyanov's proof of the lemma of Steinitz. Row i has a vector v_i of the
    differences between its columns, with d = p - 1 dimensions; the sum of all v_i is 0. While k rows are
    left, there are weights 0 <= w_i <= 1 with sum w_i v_i = 0 and sum w_i = k - 1 - d, and at a vertex of
    this polytope one weight is 0: that row is placed last. For the remaining rows sum v_i =
    sum (1 - w_i) v_i, where the factors 1 - w_i add up to d.
    """
    from scipy.optimize import linprog

    vectors = np.diff(matrix, axis=1) / max(matrix.max(), TINY)
    dimensions = vectors.shape[1]
    left = np.arange(len(matrix))
    last: list[int] = []
    while len(left) > dimensions + 1:
        weights = linprog(
            c=np.zeros(len(left)),
            A_eq=np.vstack([vectors[left].T, np.ones(len(left))]),
            b_eq=np.append(np.zeros(dimensions), len(left) - 1 - dimensions),
            bounds=(0, 1),
            method="highs-ds",
        ).x
        lightest = int(weights.argmin())
        last.append(int(left[lightest]))
        left = np.delete(left, lightest)
    return np.append(left, np.array(last[::-1], dtype=np.intp))


def _circle(matrix: Matrix) -> tuple[Matrix, bool]:
    """Return each unit's start on the circle, and true if no configuration overlaps itself there.

    Each worker has the least shift against the previous one with which it follows that worker in every
    configuration and ends a unit at the cut. The shift is at most p T_max plus T_max, which leads to the
    factor p^2 + p - 1.
    """
    ends = np.cumsum(matrix, axis=0)
    begins = ends - matrix
    # Unit times may all be 0.
    around_s = max(float(ends[-1].max()), TINY)
    behind_s = [0.0]
    for worker in range(1, matrix.shape[1]):
        least_s = behind_s[-1] + float((ends[:, worker - 1] - begins[:, worker]).max())
        gaps_s = _around(-ends[:, worker] - least_s, around_s)
        behind_s.append(least_s + float(gaps_s.min()))
    has_room = behind_s[-1] + ends[:, -1] <= around_s * (1 + PRECISION) + begins[:, 0]
    return _around(begins + np.array(behind_s), around_s), bool(has_room.all())


def _around(seconds: Matrix, around_s: float) -> Matrix:
    """Return times modulo the length of the circle; a time just below the length counts as 0."""
    times = np.mod(seconds, around_s)
    return np.where(times > around_s * (1 - PRECISION), 0.0, times)
