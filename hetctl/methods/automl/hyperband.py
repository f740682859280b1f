"""Hyperband: successive halving with several initial numbers of configurations (Li et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from hetctl.methods.automl.procedure import Method, NewTrial, at_least
from hetctl.methods.automl.trial_history import Trial, TrialHistory


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
    """Hyperband (Li et al., 2018, Algorithm 1); one bracket proceeds while another waits for a slow trial.

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
    def fresh(self) -> int:
        """Number of configurations that the method takes from the source."""
        return self.brackets()[-1].numbers.stop

    def brackets(self) -> tuple[Bracket, ...]:
        """Return the brackets of Algorithm 1, from s_max to 0."""
        most = 0
        # In whole numbers: log(243) / log(3) is 4.999999999999999 in floating point.
        while self.eta ** (most + 1) <= self.max_epochs:
            most += 1
        brackets, first = list[Bracket](), 0
        for s in range(most, -1, -1):
            # Rounding up in whole numbers, as the ceiling in Algorithm 1.
            trials = -(-(most + 1) * self.eta**s // (s + 1))
            epochs = tuple(self.max_epochs // self.eta ** (s - rung) for rung in range(s + 1))
            brackets.append(Bracket(range(first, first + trials), epochs))
            first += trials
        return tuple(brackets)

    def likely_epochs(self) -> tuple[int, ...]:
        """Return the epochs of each trial if the first ones of each bracket are the best."""
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
            # The barrier of successive halving; unlike in Algorithm 1, the next bracket goes on.
            if any(losses[number] is None for number in members):
                return None
            members = history.ranked(epochs, members)[: len(bracket.numbers) // self.eta**rung]
            for number in members:
                if number not in history.rung(more):
                    return replace(history.trials[number], epochs=more)
        return None
