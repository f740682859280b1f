"""Trials in steps of a few epochs, of which one of Optuna's pruners ends those without prospects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from hetctl.methods.automl.optuna_parts import PRUNERS, optuna_part
from hetctl.methods.automl.procedure import Method, NewTrial, at_least
from hetctl.methods.automl.trial_history import Report, Trial, TrialHistory


@dataclass(frozen=True)
class Pruned(Method):
    """An Optuna study whose trials report every few epochs; after each report the pruner decides.

    A trial that goes on is more urgent than a new one. Failed trials end.

    Parameters
    ----------
    trials : int
        Number of configurations.
    epochs : int
        Epochs of the trials that reach the end.
    every : int
        Epochs between two decisions.
    pruner : str
        Name of a class in ``optuna.pruners``.
    options : mapping
        Arguments of that class.
    """

    trials: int
    epochs: int
    every: int = 1
    pruner: str = "MedianPruner"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(1, trials=self.trials, epochs=self.epochs, every=self.every)
        self.new_pruner()

    @property
    def fresh(self) -> int:
        """Number of configurations that the method takes from the source."""
        return self.trials

    def likely_epochs(self) -> tuple[int, ...]:
        """Return the epochs of each trial if half of them are pruned in the middle."""
        half = -(-self.epochs // 2)
        return tuple(half if number % 2 else self.epochs for number in range(self.trials))

    def new_pruner(self) -> Any:
        """Return a new pruner; BadInputError if there is none of that name and with these options."""
        return optuna_part(PRUNERS, self.pruner, self.options)

    def next_trial(self, history: TrialHistory) -> Trial | NewTrial | None:
        """Return the first trial that is to go on, or a new one."""
        ended = _verdicts(self, history)
        for trial in history.trials:
            loss = history.rung(trial.epochs)[trial.number]
            is_reported = loss is not None and math.isfinite(loss)
            if is_reported and trial.epochs < self.epochs and trial.number not in ended:
                return replace(trial, epochs=min(trial.epochs + self.every, self.epochs))
        if len(history.trials) < self.trials:
            return NewTrial(min(self.every, self.epochs))
        return None


class _Verdicts:
    """Decisions of a pruner on the reports of a history, each when it arrives: later ones change none."""

    def __init__(self, method: Pruned) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(pruner=method.new_pruner())
        self._epochs, self._seen = method.epochs, 0
        self._trials = list[optuna.Trial]()
        self.ended = set[int]()

    def catch_up(self, history: TrialHistory) -> set[int]:
        """Take what the history has gained; return the trials that were pruned."""
        for event in history.events[self._seen :]:
            if isinstance(event, Report):
                self._judge(event)
            elif event.number == len(self._trials):
                self._trials.append(self._study.ask())
        self._seen = len(history.events)
        return self.ended

    def _judge(self, report: Report) -> None:
        from optuna.trial import TrialState

        trial = self._trials[report.trial]
        if report.loss is None:
            self._study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
            return
        trial.report(report.loss, report.epochs)
        if report.epochs >= self._epochs:
            self._study.tell(trial, report.loss)
        elif trial.should_prune():
            self.ended.add(report.trial)
            self._study.tell(trial, state=TrialState.PRUNED)


_KEPT: WeakKeyDictionary[TrialHistory, _Verdicts] = WeakKeyDictionary()
"""Verdicts by history: a decision is made once, not at each request."""


def _verdicts(method: Pruned, history: TrialHistory) -> set[int]:
    if history not in _KEPT:
        _KEPT[history] = _Verdicts(method)
    return _KEPT[history].catch_up(history)
