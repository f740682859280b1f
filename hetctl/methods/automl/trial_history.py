"""What a search asked for and what it was told: nothing else decides how it goes on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hetctl.model.errors import BadInputError

Config = Mapping[str, Any]
"""Hyper-parameters by name; the values are of JSON's types."""


@dataclass(frozen=True)
class Parent:
    """The trial with whose weights another one begins, and the epochs that had made them."""

    trial: int
    epochs: int


@dataclass(frozen=True)
class Trial:
    """A configuration that is to be trained until it has so many epochs.

    Parameters
    ----------
    number : int
        Trials count from 0. The same number with more epochs goes on where it stopped.
    epochs : int
        All that it has had by then, those of its parent included.
    parent : Parent or None
        Where it began; None: with new weights.
    """

    number: int
    config: Config
    epochs: int
    parent: Parent | None = None


@dataclass(frozen=True)
class Report:
    """How a trial did.

    Parameters
    ----------
    trial, epochs : int
        As they were asked for.
    loss : float or None
        After these epochs; less is better. None or not finite: the trial failed.
    """

    trial: int
    epochs: int
    loss: float | None


Event = Trial | Report


class TrialHistory:
    """The trials asked for and the reports that counted, in the order in which they came.

    Attributes
    ----------
    events : list of Trial and Report
        All there is to know; the rest follows from it.
    trials : list of Trial
        By number, with the epochs that were asked for last.
    best : Report or None
        The smallest loss so far; of equal ones the first.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = []
        self.trials: list[Trial] = []
        self.best: Report | None = None
        self._least_loss = math.inf
        self._rungs: dict[int, dict[int, float | None]] = {}
        for event in events:
            if isinstance(event, Trial):
                self.ask(event)
            else:
                self.tell(event)

    @property
    def waiting(self) -> tuple[Trial, ...]:
        """The trials that were asked for and have not been reported."""
        return tuple(trial for trial in self.trials if self._rungs[trial.epochs][trial.number] is None)

    def rung(self, epochs: int) -> Mapping[int, float | None]:
        """Return what was asked for with so many epochs: losses by trial, in the order asked for.

        None: not reported; infinity: failed.
        """
        return self._rungs.get(epochs, {})

    def ranked(self, epochs: int, numbers: Iterable[int] | None = None) -> list[int]:
        """Return those of the trials that have a loss after so many epochs, the best first."""
        rung = self.rung(epochs)
        losses = {n: rung.get(n) for n in (rung if numbers is None else numbers)}
        known = [(loss, n) for n, loss in losses.items() if loss is not None and math.isfinite(loss)]
        return [n for _, n in sorted(known)]

    def ask(self, trial: Trial) -> None:
        """Add a trial that is asked for."""
        if trial.number == len(self.trials):
            self.trials.append(trial)
        self.trials[trial.number] = trial
        self._rungs.setdefault(trial.epochs, {})[trial.number] = None
        self.events.append(trial)

    def tell(self, report: Report) -> bool:
        """Add a report; say whether it counts, which the first one alone does.

        Raises
        ------
        BadInputError
            If that was never asked for.
        """
        rung = self._rungs.get(report.epochs, {})
        if report.trial not in rung:
            raise BadInputError(
                f"a report names trial {report.trial} with {report.epochs} epochs, which nobody asked for"
            )
        if rung[report.trial] is not None:
            return False
        if report.loss is None or not math.isfinite(report.loss):
            report = replace(report, loss=None)
        elif report.loss < self._least_loss:
            self.best, self._least_loss = report, report.loss
        rung[report.trial] = math.inf if report.loss is None else report.loss
        self.events.append(report)
        return True
