"""Successive halving: Hyperband (Li et al., 2018), and ASHA (Li et al., 2020) with its variants."""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

from hetctl.methods.automl.procedure import Method, NewTrial, at_least
from hetctl.methods.automl.trials import Report, TrialHistory
from hetctl.model.errors import BadInputError
from hetctl.model.searches import DELAYED, PROMOTION, STOPPING, Trial
from hetctl.model.values import dataclass


@dataclass(frozen=True)
class Bracket:
    """One run of successive halving.

    Parameters
    ----------
    numbers : range
        Numbers of its trials, n of them in the paper.
    epochs : tuple of int
        Total epochs of the trials in each rung: r_i of the paper, rounded down; the last is R.
    """

    numbers: range
    epochs: tuple[int, ...]


@dataclass(frozen=True)
class Hyperband(Method):
    """Hyperband (Li et al., 2018, Algorithm 1); a bracket goes on while another waits for a slow trial.

    Failed trials count as the worst of their rung.

    Parameters
    ----------
    max_epochs : int
        R of the paper: epochs of the trials that reach the end.
    eta : int
        Reduction factor: one in `eta` trials of a rung is promoted.
    """

    max_epochs: int
    eta: int = 3

    def __post_init__(self) -> None:
        at_least(1, max_epochs=self.max_epochs)
        at_least(2, eta=self.eta)

    @property
    def trials(self) -> int:  # type: ignore[override]
        """Number of configurations of all brackets."""
        return self.brackets()[-1].numbers.stop

    def brackets(self) -> tuple[Bracket, ...]:
        """Return the brackets of Algorithm 1, from s_max to 0."""
        most = 0
        # In whole numbers, since log(243) / log(3) is 4.999999999999999.
        while self.eta ** (most + 1) <= self.max_epochs:
            most += 1
        brackets, first = list[Bracket](), 0
        for s in range(most, -1, -1):
            # The ceiling of Algorithm 1, in whole numbers.
            trials = -(-(most + 1) * self.eta**s // (s + 1))
            epochs = tuple(self.max_epochs // self.eta ** (s - rung) for rung in range(s + 1))
            brackets.append(Bracket(range(first, first + trials), epochs))
            first += trials
        return tuple(brackets)

    def likely_epochs(self) -> tuple[int, ...]:
        """Return the epochs of each trial if the first trials of each bracket are the best."""
        return tuple(
            max(e for rung, e in enumerate(b.epochs) if rung == 0 or n < len(b.numbers) // self.eta**rung)
            for b in self.brackets()
            for n in range(len(b.numbers))
        )

    def next_trial(self, history: TrialHistory) -> Trial | NewTrial | None:
        """Return the next trial of the first bracket that does not wait for reports."""
        for bracket in self.brackets():
            if len(history.trials) < bracket.numbers.stop:
                return NewTrial(bracket.epochs[0])
            promoted = self._promoted(bracket, history)
            if promoted is not None:
                return promoted
        return None

    def _promoted(self, bracket: Bracket, history: TrialHistory) -> Trial | None:
        """Return a trial to promote to the next rung; None while its rung waits for a report."""
        members = list(bracket.numbers)
        for rung, (epochs, more) in enumerate(pairwise(bracket.epochs), start=1):
            losses = history.rung(epochs)
            # The barrier of successive halving; unlike in Algorithm 1, other brackets go on.
            if any(losses[number] is None for number in members):
                return None
            members = history.ranked(epochs, members)[: len(bracket.numbers) // self.eta**rung]
            for number in members:
                if number not in history.rung(more):
                    return replace(history.trials[number], epochs=more)
        return None


EARLY_FACTOR = 2
"""Divisor of the promoted share of the first rung while trials are left to begin."""


@dataclass(frozen=True)
class Asha(Method):
    """Asynchronous promotion: promote from the highest rung down, else begin a new trial.

    Failed trials count as the worst of their rung. Algorithm 2 is the variant `PROMOTION`. `DELAYED` promotes
    only the best 1/(`EARLY_FACTOR` * eta) of the first rung while trials are left to begin: later ones would
    often overtake the others. In `STOPPING`, the variant of Ray Tune and Optuna (Klein et al., "Model-based
    Asynchronous Hyperparameter and Neural Architecture Search", 2020), a trial goes on at once if it is among
    the best 1/eta of its rung's reports so far, or the best of fewer than eta; otherwise it ends for good.

    Parameters
    ----------
    trials : int
        Number of configurations; the paper has no such limit.
    max_epochs : int
        R of the paper: epochs of the trials that reach the end.
    min_epochs : int
        r of the paper: epochs of every trial, if `stop_rate` is 0.
    eta : int
        Reduction factor: the best 1/eta of a rung's reports are promoted.
    stop_rate : int
        s of the paper, the minimum early-stopping rate: every trial gets `min_epochs` * eta^s epochs.
    variant : str
        `DELAYED`, `PROMOTION` or `STOPPING`.
    """

    trials: int
    max_epochs: int
    min_epochs: int = 1
    eta: int = 4
    stop_rate: int = 0
    variant: str = DELAYED

    def __post_init__(self) -> None:
        at_least(1, trials=self.trials, min_epochs=self.min_epochs)
        at_least(2, eta=self.eta)
        at_least(0, stop_rate=self.stop_rate)
        first = self.min_epochs * self.eta**self.stop_rate
        if self.max_epochs < first:
            raise BadInputError(f"max_epochs is {self.max_epochs}, but the first rung has {first}")

    @property
    def epochs(self) -> tuple[int, ...]:
        """Epochs of the rungs: r * eta^(s+k), up to R."""
        rungs = [self.min_epochs * self.eta**self.stop_rate]
        while rungs[-1] * self.eta <= self.max_epochs:
            rungs.append(rungs[-1] * self.eta)
        return tuple(rungs)

    def likely_epochs(self) -> tuple[int, ...]:
        """Return the epochs of each trial if the first trials are the best."""
        return tuple(
            max(e for rung, e in enumerate(self.epochs) if rung == 0 or n < self.trials // self.eta**rung)
            for n in range(self.trials)
        )

    def next_trial(self, history: TrialHistory) -> Trial | NewTrial | None:
        """Return the next trial, as ``get_job`` of Algorithm 2."""
        again = VARIANTS[self.variant](self, history)
        if again is None and len(history.trials) < self.trials:
            return NewTrial(self.epochs[0])
        return again

    def _promoted(self, history: TrialHistory, factor: int = 1) -> Trial | None:
        """Return the best trial to promote from the highest rung that has one; None if no rung has."""
        first = self.epochs[0]
        # Highest rung first, as in `get_job` of Algorithm 2.
        for epochs, more in reversed(list(pairwise(self.epochs))):
            one_in = self.eta * factor if epochs == first else self.eta
            for number in history.ranked(epochs)[: history.reported(epochs) // one_in]:
                if number not in history.rung(more):
                    return replace(history.trials[number], epochs=more)
        return None

    def _next_to_continue(self, history: TrialHistory) -> Trial | None:
        """Return the first trial that goes on after its report and has not been asked for since."""
        more = dict(pairwise(self.epochs))
        losses: dict[int, list[float]] = defaultdict(list)
        for report in history.events:
            if not isinstance(report, Report):
                continue
            loss, rung = math.inf if report.loss is None else report.loss, losses[report.epochs]
            insort(rung, loss)
            is_good = loss < math.inf and loss <= rung[max(1, len(rung) // self.eta) - 1]
            epochs = more.get(report.epochs)
            if is_good and epochs is not None and report.trial not in history.rung(epochs):
                return replace(history.trials[report.trial], epochs=epochs)
        return None


VARIANTS: Mapping[str, Callable[[Asha, TrialHistory], Trial | None]] = {
    DELAYED: lambda asha, history: asha._promoted(
        history, EARLY_FACTOR if len(history.trials) < asha.trials else 1
    ),
    PROMOTION: Asha._promoted,
    STOPPING: Asha._next_to_continue,
}
"""Choice of the trial to go on, by variant."""
