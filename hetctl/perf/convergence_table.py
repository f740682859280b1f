"""Epochs of many members at once, each by the curves that may have produced its losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hetctl.perf.convergence import FLOORS, LEAST_WEIGHT, Guess

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

    Array = NDArray[float64]

BLOCK = 512
"""Rows that are computed together, so that they fit into the processor's cache."""


class CurveTable:
    """Table with a row per member: logarithms of its curves' likelihoods and epochs to convergence."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._rows: dict[str, int] = {}
        self._columns: tuple[Array, Array, Array] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def put(self, name: str, fits: Array, logs: Array, done: int) -> None:
        """Set the row of a member that has finished `done` epochs."""
        if name not in self._rows:
            self._rows[name] = len(self._names)
            self._names.append(name)
        row = self._rows[name]
        fits_column, logs_column, done_column = self._with_room()
        # Rows of fewer curves are padded with curves of likelihood 0.
        fits_column[row], logs_column[row], done_column[row] = -math.inf, 0.0, done
        fits_column[row, : len(fits)], logs_column[row, : len(logs)] = fits, logs

    def drop(self, name: str) -> None:
        """Remove a member's row, if it has one; the last row takes its place."""
        if name not in self._rows:
            return
        row, last = self._rows.pop(name), self._names.pop()
        if last != name:
            for column in self._columns or ():
                column[row] = column[len(self._names)]
            self._names[row], self._rows[last] = last, row

    def epochs(self, names: Iterable[str], guess: Guess | None) -> dict[str, float]:
        """Return the total epochs of those members that have a row, as `convergence.predict_epochs` does."""
        wanted = [name for name in names if name in self._rows]
        rows = [self._rows[name] for name in wanted]
        blocks = [self._epochs(rows[at : at + BLOCK], guess) for at in range(0, len(rows), BLOCK)]
        return dict(zip(wanted, itertools.chain.from_iterable(blocks), strict=True))

    def _epochs(self, rows: list[int], guess: Guess | None) -> list[float]:
        fits, logs, done = (column[rows] for column in self._with_room())
        found: list[float] = weighted_rows(fits, logs, done, guess).tolist()
        return found

    def _with_room(self) -> tuple[Array, Array, Array]:
        """Return the columns, enlarged to at least one row for each member."""
        import numpy as np

        if self._columns is None:
            self._columns = np.empty((BLOCK, FLOORS)), np.empty((BLOCK, FLOORS)), np.empty(BLOCK)
        fits, logs, done = self._columns
        if len(self._names) > len(done):
            self._columns = fits, logs, done = (
                np.concatenate([fits, fits]),
                np.concatenate([logs, logs]),
                np.concatenate([done, done]),
            )
        return fits, logs, done


def weighted_rows(fits: Array, logs: Array, done: Array | float, guess: Guess | None) -> Array:
    """Return the weighted epochs of each row, as `convergence.weighted_epochs` does for one member.

    Parameters
    ----------
    fits, logs : array, (members, curves)
        Logarithms of the curves' likelihoods, and of their epochs to convergence.
    done : array, (members,), or float
        Finished epochs.
    """
    import numpy as np

    done = np.broadcast_to(done, len(fits))
    far = 0.0 if guess is None else ((logs - math.log(guess.epochs)) / guess.spread) ** 2 / 2
    weights = fits - far
    # As in `weighted_epochs`: exp() must not underflow for all curves of a row.
    weights -= weights.max(axis=1, keepdims=True)
    np.exp(weights, out=weights)
    weights *= np.exp(logs) > done[:, None]
    total = weights.sum(axis=1)
    usable = total > LEAST_WEIGHT
    weights *= logs
    mean = weights.sum(axis=1) / np.where(usable, total, 1.0)
    found: Array = np.where(usable, np.maximum(np.exp(mean), done + 0.5), done + np.maximum(0.5, 0.03 * done))
    return found
