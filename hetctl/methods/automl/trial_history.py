"""History of a search: its requests and reports, which alone determine how it continues."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hetctl.model.errors import BadInputError

Config = Mapping[str, Any]
"""Hyper-parameters by name; the values have JSON's types."""


@dataclass(frozen=True)
class Parent:
    """The trial whose weights another trial starts from, and the epochs for which they were trained."""

    trial: int
    epochs: int


@dataclass(frozen=True)
class Trial:
    """A configuration to be trained up to a total number of epochs.

    Parameters
    ----------
    number : int
        Number of the trial, counted from 0. The same number with more epochs continues the same trial.
    epochs : int
        Total epochs at the end, those of its parent included.
    parent : Parent or None
        Origin of the initial weights; None for new weights.
    """

    number: int
    config: Config
    epochs: int
    parent: Parent | None = None


@dataclass(frozen=True)
class Report:
    """Result of a trial.

    Parameters
    ----------
    trial, epochs : int
        Number and total epochs of the trial, as requested.
    loss : float or None
        Loss after these epochs; lower is better. The trial failed if it is None or not finite.
    """

    trial: int
    epochs: int
    loss: float | None


TrialEvent = Trial | Report


class TrialHistory:
    """Requested trials and the reports that counted, in chronological order.

    Attributes
    ----------
    events : list of Trial and Report
        Complete history, from which everything else follows.
    trials : list of Trial
        Trials by number, each with the epochs of its latest request.
    best : Report or None
        Report with the lowest loss so far; the first of equal ones.
    """

    def __init__(self, events: Iterable[TrialEvent] = ()) -> None:
        self.events: list[TrialEvent] = []
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
        """Trials that were asked for and are not reported yet."""
        return tuple(trial for trial in self.trials if self._rungs[trial.epochs][trial.number] is None)

    def rung(self, epochs: int) -> Mapping[int, float | None]:
        """Return the losses of the trials requested with these epochs, by trial in the order of requests.

        A loss is None before the report, and infinite for a failed trial.
        """
        return self._rungs.get(epochs, {})

    def ranked(self, epochs: int, numbers: Iterable[int] | None = None) -> list[int]:
        """Return the trials that have a finite loss after these epochs, the best first."""
        rung = self.rung(epochs)
        losses = {n: rung.get(n) for n in (rung if numbers is None else numbers)}
        known = [(loss, n) for n, loss in losses.items() if loss is not None and math.isfinite(loss)]
        # Equal losses are ranked by number, whatever the order of the reports.
        return [n for _, n in sorted(known)]

    def ask(self, trial: Trial) -> None:
        """Add a requested trial."""
        if trial.number == len(self.trials):
            self.trials.append(trial)
        self.trials[trial.number] = trial
        self._rungs.setdefault(trial.epochs, {})[trial.number] = None
        self.events.append(trial)

    def tell(self, report: Report) -> bool:
        """Add a report and return true if it counts, which is the case for the first report of a request.

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
        # A trial that was given up may report later after all; the decision that followed stands.
        if rung[report.trial] is not None:
            return False
        if report.loss is None or not math.isfinite(report.loss):
            # The history is saved as JSON, which has neither NaN nor infinity.
            report = replace(report, loss=None)
        elif report.loss < self._least_loss:
            self.best, self._least_loss = report, report.loss
        rung[report.trial] = math.inf if report.loss is None else report.loss
        self.events.append(report)
        return True
