"""Epochs to convergence of members: from their own results so far, or else from the other members'."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from hetctl.model.ensemble import Member, StopRule
from hetctl.model.training_progress import EpochHistory, Progress
from hetctl.perf.convergence import (
    FLOORS,
    LEAST_WEIGHT,
    EpochPrior,
    Likelihood,
    errors_as_losses,
    fit_histories,
    log_epochs,
    predict_epochs,
)

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

    Array = NDArray[float64]

LEAST_OTHERS = 3
"""Least number of known members for predicting one without results and without `expected_epochs`."""
AUTHORS_SPREAD = 0.5
"""Spread of the logarithm of an author's `expected_epochs`, that is a factor of e^0.5."""
PRIOR_DIGITS = 2
"""Decimals of the logarithms of the others' epochs; rounding keeps one member's epoch from changing the
predictions of all others."""
UNIT = 2**40

Epochs = dict[str, tuple[int, str]]
"""Total epochs by member, with the source of the prediction."""


class ConvergenceForecast:
    """Total epochs of a run's active members, kept up to date.

    Omitted are members whose results cannot be fitted, unless those of others can and the author of the
    ensemble gave no `expected_epochs` for them.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self._members = {member.name: member for member in members}
        self._own_logs: dict[str, float] = {}
        self._logs = _Logs()
        self._others: EpochPrior | None = None
        self._by_author: dict[str, float] = {}
        self._fitted = CurveTable()
        self._unfitted: dict[str, int] = {}
        self._epochs: dict[str, tuple[int, str]] = {}

    @property
    def epochs(self) -> Mapping[str, tuple[int, str]]:
        """Total epochs by member, with the source of the prediction."""
        return self._epochs

    def update(self, changed: Mapping[str, Progress]) -> set[str]:
        """Update the progress of members; return the members whose predictions have changed."""
        trying = {name: done for name, done in changed.items() if not done.converged}
        fits = _fits({name: self._members[name] for name in trying}, trying)
        for name, done in changed.items():
            self._store(name, done, *fits.get(name, (None, self._members[name].stop)))
        others = self._logs.prior()
        moved, self._others = others != self._others, others
        names = {*changed, *self._fitted, *self._unfitted} if moved else changed.keys()
        found = self._predicted(names)
        updated = {name for name in names if self._epochs.get(name) != found.get(name)}
        for name in updated:
            self._epochs.pop(name, None)
        self._epochs |= {name: found[name] for name in updated & found.keys()}
        return updated

    def _store(self, name: str, done: Progress, fit: Likelihood | None, rule: StopRule) -> None:
        """Store a member according to the data available for its prediction."""
        self._discard(name)
        count = len(done.epochs)
        if done.converged:
            self._record(name, count)
        elif fit:
            self._store_fit(name, fit, rule, done)
        elif done.active and rule.expected_epochs is None:
            self._unfitted[name] = count

    def _store_fit(self, name: str, fit: Likelihood, rule: StopRule, done: Progress) -> None:
        """Make the predictions from a member's results that do not depend on other members."""
        count, logs = len(done.epochs), log_epochs(fit, rule)
        rows = fit.logs[None], logs[None], count
        self._record(name, float(weighted_rows(*rows, None)[0]))
        if done.active and rule.expected_epochs is not None:
            prior = EpochPrior(float(rule.expected_epochs), AUTHORS_SPREAD)
            self._by_author[name] = float(weighted_rows(*rows, prior)[0])
        elif done.active:
            self._fitted.put(name, fit.logs, logs, count)

    def _record(self, name: str, epochs: float) -> None:
        """Record the epochs of a member that follow from its own results alone."""
        self._own_logs[name] = math.log(max(epochs, 1.0))
        self._logs.add(self._own_logs[name])

    def _discard(self, name: str) -> None:
        if name in self._own_logs:
            self._logs.remove(self._own_logs.pop(name))
        self._by_author.pop(name, None)
        self._fitted.drop(name)
        self._unfitted.pop(name, None)

    def _predicted(self, names: Collection[str]) -> Epochs:
        by_results = self._fitted.epochs(names, self._others)
        by_results |= {name: self._by_author[name] for name in names if name in self._by_author}
        return {
            **self._in_whole(by_results, "by its results so far (Capes, Equation 1)"),
            **self._in_whole(self._as_others(names), "as other members take"),
        }

    def _as_others(self, names: Collection[str]) -> dict[str, float]:
        """Return the epochs of members whose results cannot be fitted; none if no other members are known."""
        if self._others is None:
            return {}
        counts = {name: self._unfitted[name] for name in names if name in self._unfitted}
        beyond = {n: predict_epochs(None, StopRule(), n, self._others)[0] for n in {*counts.values()}}
        return {name: beyond[count] for name, count in counts.items()}

    def _in_whole(self, epochs: Mapping[str, float], how: str) -> Epochs:
        limits = {name: self._members[name].stop.max_epochs for name in epochs}
        # The tolerance keeps rounding errors of exp() and log() from adding an epoch.
        whole = {name: min(math.ceil(count - 1e-6), limits[name]) for name, count in epochs.items()}
        return {name: (count, f"{count} epochs in all {how}") for name, count in whole.items()}


def _fits(
    members: Mapping[str, Member], progress: Mapping[str, Progress]
) -> dict[str, tuple[Likelihood | None, StopRule]]:
    """Fit the results of members as losses; return also the corresponding stop rules."""
    losses = {name: as_losses for name in members if (as_losses := _losses(members[name], progress[name]))}
    fits = fit_histories([values for values, _ in losses.values()])
    return {name: (fit, rule) for (name, (_, rule)), (fit, _) in zip(losses.items(), fits, strict=True)}


def _losses(member: Member, done: Progress) -> tuple[list[float], StopRule] | None:
    metric = member.stop.metric
    return errors_as_losses(EpochHistory.of(done.epochs).values(metric), member.stop)


class _Logs:
    """Logarithms of epochs, with their median and deviation, independent of the order of additions.

    Sums are of integer multiples of 1 / `UNIT`, and therefore exact.
    """

    def __init__(self) -> None:
        self._sorted: list[int] = []
        self._sum = self._squares = 0

    def add(self, log: float) -> None:
        value = round(log * UNIT)
        insort(self._sorted, value)
        self._sum += value
        self._squares += value * value

    def remove(self, log: float) -> None:
        value = round(log * UNIT)
        del self._sorted[bisect_left(self._sorted, value)]
        self._sum -= value
        self._squares -= value * value

    def prior(self) -> EpochPrior | None:
        """Return the estimate for another member; None if too few are known."""
        count = len(self._sorted)
        if count < LEAST_OTHERS:
            return None
        middle = self._sorted[(count - 1) // 2] + self._sorted[count // 2]
        variance = (count * self._squares - self._sum**2) / (count * (count - 1))
        median, deviation = middle / 2 / UNIT, math.sqrt(variance) / UNIT
        # If all others took equally long the spread would be 0, by which the prior is divided.
        return EpochPrior(math.exp(round(median, PRIOR_DIGITS)), max(round(deviation, PRIOR_DIGITS), 0.1))


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

    def epochs(self, names: Iterable[str], prior: EpochPrior | None) -> dict[str, float]:
        """Return the total epochs of those members that have a row, as `convergence.predict_epochs` does."""
        wanted = [name for name in names if name in self._rows]
        rows = [self._rows[name] for name in wanted]
        blocks = [self._epochs(rows[at : at + BLOCK], prior) for at in range(0, len(rows), BLOCK)]
        return dict(zip(wanted, itertools.chain.from_iterable(blocks), strict=True))

    def _epochs(self, rows: list[int], prior: EpochPrior | None) -> list[float]:
        fits, logs, done = (column[rows] for column in self._with_room())
        found: list[float] = weighted_rows(fits, logs, done, prior).tolist()
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


def weighted_rows(fits: Array, logs: Array, done: Array | float, prior: EpochPrior | None) -> Array:
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
    far = 0.0 if prior is None else ((logs - math.log(prior.epochs)) / prior.spread) ** 2 / 2
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
