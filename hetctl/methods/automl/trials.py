"""Trials of a search: the space of configurations, the history of reports, and who is ahead or behind."""

from __future__ import annotations

import math
import random
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from statistics import NormalDist, median
from typing import Any

from hetctl.model.errors import BadInputError
from hetctl.model.searches import Trial
from hetctl.model.values import dataclass

Value = bool | int | float | str | None
Condition = Mapping[str, tuple[Value, ...]]
"""Values of other keys, any of which a config must have for a key to be in it."""
BELOW_ONE = math.nextafter(1.0, 0.0)
PRIOR_SHARE = 0.5
"""Share of the draws of a choice that are its prior."""
PRIOR_DEVIATION = 0.25
"""Standard deviation of draws around the prior of a range, as a share of the range."""


@dataclass(frozen=True)
class Categorical:
    """A choice among values, all equally likely but for a prior.

    Parameters
    ----------
    prior : Value or None
        Value that is half of the draws; None: no value is.
    """

    values: tuple[Value, ...]
    when: Condition = field(default_factory=dict)
    prior: Value = None

    @property
    def count(self) -> int:
        """Number of values."""
        return len(self.values)

    def at(self, share: float) -> Value:
        """Return the value at a position in [0, 1)."""
        if self.prior is not None:
            if share < PRIOR_SHARE:
                return self.prior
            share = (share - PRIOR_SHARE) / (1 - PRIOR_SHARE)
        return self.values[int(share * len(self.values))]

    def holds(self, value: Value) -> bool:
        """Return true if a value is one of its values."""
        return value in self.values


@dataclass(frozen=True)
class NumberRange:
    """A range of numbers from `low` to `high`, both included.

    Parameters
    ----------
    log : bool
        True if all orders of magnitude are equally likely, rather than all numbers.
    whole : bool
        True for integers only.
    step : int
        Distance of integers, of which `low` is the first.
    prior : float or None
        Value around which numbers are likelier, normally distributed within the range; None: there is none.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False
    step: int = 1
    when: Condition = field(default_factory=dict)
    prior: float | None = None

    def at(self, share: float) -> Value:
        """Return the value at a position in [0, 1)."""
        if self.prior is not None:
            around = NormalDist(self._position(self.prior), PRIOR_DEVIATION)
            least, most = around.cdf(0.0), around.cdf(1.0)
            # The inverse is not defined at the ends.
            share = min(max(around.inv_cdf(least + max(share, 1e-12) * (most - least)), 0.0), BELOW_ONE)
        if self.step > 1:
            return int(self.low) + self.step * int(share * self.count)
        # The value is rounded down, so this makes the upper end as likely as the others.
        high = self.high + 1 if self.whole else self.high
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(high) - math.log(self.low)))
        else:
            value = self.low + share * (high - self.low)
        if self.whole:
            value = math.floor(value)
        # Rounding in exp() of a logarithm may leave the range.
        return min(max(value, self.low), self.high)

    @property
    def count(self) -> int:
        """Number of integers in it."""
        return int(self.high - self.low) // self.step + 1

    def holds(self, value: Value) -> bool:
        """Return true if a value is in it."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return self.low <= value <= self.high and (not self.whole or (value - self.low) % self.step == 0)

    def _position(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


Parameter = Categorical | NumberRange
Space = Mapping[str, Parameter]
Config = Mapping[str, Any]
"""Hyper-parameters by name; the values have JSON's types."""


def active_part(space: Space, config: Config) -> dict[str, Value]:
    """Return a config without the keys whose conditions do not hold; these name earlier keys of the space."""
    found: dict[str, Value] = {}
    for name, value in config.items():
        if is_active(space[name], found):
            found[name] = value
    return found


def is_active(parameter: Parameter, config: Mapping[str, Value]) -> bool:
    """Return true if the condition of a parameter holds in a config, or it has none."""
    return all(key in config and config[key] in values for key, values in parameter.when.items())


def draws(seed: int, number: int) -> random.Random:
    """Return the random generator of one trial, which depends on the seed and the trial's number alone."""
    # Python hashes a text with SHA-512, the same in every process.
    return random.Random(f"{seed}/{number}")


@dataclass(frozen=True)
class Report:
    """Result of a trial.

    Parameters
    ----------
    trial, epochs : int
        Number and total epochs of the trial, as requested.
    loss : float or None
        Loss after these epochs; lower is better. None or not finite for a failed trial.
    more : tuple of float
        Losses by further metrics; empty if the trial failed or the search has a single metric.
    """

    trial: int
    epochs: int
    loss: float | None
    more: Losses = ()


TrialEvent = Trial | Report


class TrialHistory:
    """Requested trials, and the reports that counted, in chronological order.

    Attributes
    ----------
    events : list of Trial and Report
        Complete history, from which all else follows.
    trials : list of Trial
        Trials by number, each with the epochs of its latest request.
    """

    def __init__(self, events: Iterable[TrialEvent] = ()) -> None:
        self.events: list[TrialEvent] = []
        self.trials: list[Trial] = []
        self._rungs: dict[int, dict[int, float | None]] = {}
        self._waiting: dict[int, Trial] = {}
        self._ranked: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self._reported: dict[int, int] = defaultdict(int)
        self._more: dict[int, dict[int, Losses]] = defaultdict(dict)
        self._orders: dict[int, tuple[int, list[int]]] = {}
        """Order of a rung's trials with several losses, with the number of its reports."""
        for event in events:
            if isinstance(event, Trial):
                self.ask(event)
            else:
                self.tell(event)

    @property
    def waiting(self) -> tuple[Trial, ...]:
        """Requested trials without a report, by number."""
        return tuple(self._waiting[number] for number in sorted(self._waiting))

    def rung(self, epochs: int) -> Mapping[int, float | None]:
        """Return the losses of the trials requested with these epochs, by trial, in the order of requests.

        A loss is None before the report, and infinite for a failed trial.
        """
        return self._rungs.get(epochs, {})

    def ranked(self, epochs: int, numbers: Iterable[int] | None = None) -> list[int]:
        """Return the trials with a finite loss after these epochs, the best first.

        With several losses the trials of better Pareto fronts come first, see `pareto_order`.
        """
        wanted = None if numbers is None else set(numbers)
        more = self._more.get(epochs)
        order = self._order(epochs, more) if more else [n for _, n in self._ranked[epochs]]
        return [n for n in order if wanted is None or n in wanted]

    def reported(self, epochs: int) -> int:
        """Return the number of trials that have reported after these epochs."""
        return self._reported[epochs]

    def _order(self, epochs: int, more: Mapping[int, Losses]) -> list[int]:
        # It takes long with many trials, and is asked for again and again.
        if self._orders.get(epochs, (0, []))[0] != len(more):
            rung = self.rung(epochs)
            points = {number: (rung[number] or 0.0, *losses) for number, losses in more.items()}
            self._orders[epochs] = len(more), pareto_order(points)
        return self._orders[epochs][1]

    def ask(self, trial: Trial) -> None:
        """Add a requested trial."""
        if trial.number == len(self.trials):
            self.trials.append(trial)
        self.trials[trial.number] = trial
        self._rungs.setdefault(trial.epochs, {})[trial.number] = None
        self._waiting[trial.number] = trial
        self.events.append(trial)

    def tell(self, report: Report) -> bool:
        """Add a report and return true if it counts: if it is the first one of a request.

        Raises
        ------
        BadInputError
            If the trial was not asked for with these epochs.
        """
        rung = self._rungs.get(report.epochs, {})
        if report.trial not in rung:
            raise BadInputError(
                f"a report names trial {report.trial} with {report.epochs} epochs, which was not requested"
            )
        # A trial that was given up may still report; the decision that followed stands.
        if rung[report.trial] is not None:
            return False
        if report.loss is None or not all(map(math.isfinite, (report.loss, *report.more))):
            # The history is saved as JSON, which has neither NaN nor infinity.
            report = replace(report, loss=None, more=())
        if report.more:
            self._more[report.epochs][report.trial] = report.more
        loss = rung[report.trial] = math.inf if report.loss is None else report.loss
        self._reported[report.epochs] += 1
        if loss < math.inf:
            # Equal losses are ranked by number, whatever the order of the reports.
            insort(self._ranked[report.epochs], (loss, report.trial))
        if report.epochs == self.trials[report.trial].epochs:
            self._waiting.pop(report.trial, None)
        self.events.append(report)
        return True


Losses = tuple[float, ...]


def dominates(one: Losses, other: Losses) -> bool:
    """Return true if a point is nowhere worse than another one, and better somewhere; less is better."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def front_of(points: Mapping[int, Losses]) -> list[int]:
    """Return the points that no other one dominates, in their order."""
    # Only a point before it in the order of losses can dominate another.
    front: list[int] = []
    for number in sorted(points, key=lambda each: points[each]):
        if not any(dominates(points[other], points[number]) for other in front):
            front.append(number)
    kept = {*front}
    return [number for number in points if number in kept]


def pareto_order(points: Mapping[int, Losses]) -> list[int]:
    """Return the points by fronts, the best first; in a front those farthest from others first."""
    left, order = dict(sorted(points.items())), list[int]()
    while left:
        front = front_of(left)
        distances = _crowding([left[number] for number in front])
        ranks = sorted(zip(front, distances, strict=True), key=lambda each: (-each[1], each[0]))
        order += [number for number, _ in ranks]
        left = {number: losses for number, losses in left.items() if number not in {*front}}
    return order


def _crowding(front: Sequence[Losses]) -> list[float]:
    """Return the crowding distance of each point of a front; infinite for those with the least of a loss."""
    distances = [0.0] * len(front)
    for losses in zip(*front, strict=True):
        order = sorted(range(len(front)), key=losses.__getitem__)
        width = losses[order[-1]] - losses[order[0]]
        distances[order[0]] = distances[order[-1]] = math.inf
        for before, at, after in zip(order, order[1:], order[2:], strict=False):
            distances[at] += (losses[after] - losses[before]) / width if width else 0.0
    return distances


Point = tuple[int, int]
"""Epoch, from 1, and samples trained in it."""
Curve = Sequence[tuple[Point, float]]
"""Losses of a trial by point, in order."""


def is_behind(own: Curve, others: Iterable[Curve], least: int) -> bool:
    """Return true if a trial's newest loss is above the median of those that others had at this point.

    Of each trial that has reached the point, the newest loss up to it counts: trials need not report at the
    same points. The rule of the paper takes averages over all earlier points instead, which hide a late fall.

    Parameters
    ----------
    own : Curve
        Its losses, at least one.
    least : int
        Fewest trials with such a loss; with fewer none is behind.
    """
    point, loss = own[-1]
    there = [curve for curve in others if curve and curve[-1][0] >= point and curve[0][0] <= point]
    losses = [curve[bisect_right(curve, point, key=lambda each: each[0]) - 1][1] for curve in there]
    return len(losses) >= least and loss > median(losses)
