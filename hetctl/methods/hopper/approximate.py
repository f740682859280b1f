"""`approximate`: open shops by vector rearrangement (CEREBRO, section 4.2).

The method is that of Fiala (1983) on top of the lemma of Steinitz; Woeginger (2018) tells it briefly.
All workers are given the same load, and configurations an order in which no worker gets far ahead of
another at any time. The workers then go through that order on a circle as long as the load, each some
way behind the one before it; where the circle is cut, a unit ends on every worker.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.hopper.list_schedule import Numbers, dispatch
from hetctl.methods.hopper.schedule import PRECISION, Place, Schedule, in_sequence
from hetctl.methods.hopper.search_options import SearchOptions
from hetctl.methods.hopper.unit_times import UnitTimes

Matrix = NDArray[np.float64]
TINY = float(np.finfo(np.float64).tiny)


def approximate(units: UnitTimes, _options: SearchOptions) -> Schedule:
    """Return the schedule of the rearrangement.

    It takes L_max (Equation 3) wherever the circle has room for it, which is sure where `is_optimal`
    holds. Elsewhere the circle is the list of a dense schedule, which takes at most
    L_max + (p - 1) T_max: the worker that ends last idles only while the configuration that it ends
    with is at its other p - 1 units.

    Raises
    ------
    BadInputError
        If partitions have replicas: the method is tied to the open shop (section 4.5).
    """
    matrix = units.matrix
    level = _levelled(matrix)
    order = _order(level)
    starts, has_room = _circle(level[order])
    numbers = order[:, None] * matrix.shape[1] + np.arange(matrix.shape[1])
    list_ = numbers.ravel()[np.lexsort((matrix[order].ravel(), starts.ravel()))]
    if has_room:
        return in_sequence(units, _places(list_, units))
    rank = np.empty_like(list_)
    rank[list_] = np.arange(len(list_))

    def first_on_circle(_worker: int, ready: Numbers) -> int:
        return int(ready[rank[ready].argmin()])

    return dispatch(units, first_on_circle)


def _places(numbers: Numbers, units: UnitTimes) -> list[Place]:
    configs, partitions = np.divmod(numbers, len(units.partitions))
    workers = units.homes[partitions]
    return list(zip(configs.tolist(), partitions.tolist(), workers.tolist(), strict=True))


def is_optimal(matrix: Matrix) -> bool:
    """Tell whether the method is sure to find an optimum: L_max >= (p^2 + p - 1) T_max."""
    partitions = matrix.shape[1]
    return bool(matrix.sum(axis=0).max() >= (partitions**2 + partitions - 1) * matrix.max())


def _levelled(matrix: Matrix) -> Matrix:
    """Lengthen units, up to T_max (Equation 4), until all workers have the load L_max."""
    loads = matrix.sum(axis=0)
    room = matrix.max() - matrix
    before = np.cumsum(room, axis=0) - room
    return np.asarray(matrix + np.clip(loads.max() - loads - before, 0, room))


def _order(matrix: Matrix) -> Numbers:
    """Return an order of the rows as `rearranged` promises it; a greedy one, which is quick, mostly is."""
    order = greedy(matrix)
    is_close = apart(matrix[order]) <= (matrix.shape[1] - 1) * matrix.max()
    return order if is_close else rearranged(matrix)


def apart(matrix: Matrix) -> float:
    """Return how far, at most, workers get from one another that go through the rows one by one."""
    return float(np.ptp(np.cumsum(matrix, axis=0), axis=1).max())


def greedy(matrix: Matrix) -> Numbers:
    """Return an order of the rows in which each next one keeps the columns' sums closest to each other."""
    left = np.arange(len(matrix))
    order: list[int] = []
    done = np.zeros(matrix.shape[1])
    while len(left):
        closest = int(np.ptp(done + matrix[left], axis=1).argmin())
        order.append(int(left[closest]))
        done += matrix[left[closest]]
        left = np.delete(left, closest)
    return np.array(order, dtype=np.intp)


def rearranged(matrix: Matrix) -> Numbers:
    """Return an order of the rows in which workers get at most (p - 1) T_max `apart`.

    Parameters
    ----------
    matrix : array of shape (configs, partitions)
        With the same sum over the rows in each column.

    Notes
    -----
    The lemma of Steinitz, as Grinberg and Sevastyanov proved it. Rows have the vectors v_i of
    differences between their columns, of d = p - 1 dimensions and with the sum 0. As long as k of them
    are left, there are weights w_i of 0 to 1 with sum w_i v_i = 0 and the sum k - 1 - d, and at a vertex
    of these one weight is 0: that row comes last. For those that are left sum v_i = sum (1 - w_i) v_i,
    in which the factors add up to d.
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
    """Return when each unit begins on the circle, and whether no configuration overlaps itself there.

    Each worker is as little behind the one before it as lets it follow in every configuration and end a
    unit at the cut: p T_max and another T_max at most, which makes for the p^2 + p - 1.
    """
    ends = np.cumsum(matrix, axis=0)
    begins = ends - matrix
    around_s = max(float(ends[-1].max()), TINY)
    behind_s = [0.0]
    for worker in range(1, matrix.shape[1]):
        least_s = behind_s[-1] + float((ends[:, worker - 1] - begins[:, worker]).max())
        gaps_s = _around(-ends[:, worker] - least_s, around_s)
        behind_s.append(least_s + float(gaps_s.min()))
    has_room = behind_s[-1] + ends[:, -1] <= around_s * (1 + PRECISION) + begins[:, 0]
    return _around(begins + np.array(behind_s), around_s), bool(has_room.all())


def _around(seconds: Matrix, around_s: float) -> Matrix:
    """Return times on the circle; what is just short of the cut is on it."""
    times = np.mod(seconds, around_s)
    return np.where(times > around_s * (1 - PRECISION), 0.0, times)
