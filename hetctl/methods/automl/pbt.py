"""Population-based training as used in CEREBRO (appendix 11; Jaderberg et al., 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetctl.methods.automl.procedure import Method, NewTrial, at_least
from hetctl.methods.automl.trials import TrialHistory, draws
from hetctl.model.searches import Parent, Trial
from hetctl.model.values import dataclass


@dataclass(frozen=True)
class Mutation:
    """Change of a value from a parent to its child.

    Parameters
    ----------
    steps : tuple of float
        Possible steps to add, equally likely (CEREBRO).
    low, high : float
        Bounds of the result; integers remain integers.
    multiply : bool
        True to multiply by the step instead (Jaderberg et al., section 4.1.1: 0.8 or 1.2).
    """

    steps: tuple[float, ...]
    low: float
    high: float
    multiply: bool = False

    def of(self, value: float, share: float) -> float:
        """Return the changed value.

        Parameters
        ----------
        share : float
            Position of the step among `steps`, in [0, 1).
        """
        step = self.steps[int(share * len(self.steps))]
        changed = value * step if self.multiply else value + step
        kept = min(max(changed, self.low), self.high)
        # A factor such as 0.8 turns a whole number, such as a number of layers, into a float.
        return round(kept) if isinstance(value, int) else kept


@dataclass(frozen=True)
class Pbt(Method):
    """Replacement of a population's worse half by mutants of the better half after each iteration.

    A mutant starts with its parent's weights. An iteration begins when all reports of the last one have
    arrived. Failed trials are in the worse half; if more than half fail, all of these are replaced.

    Parameters
    ----------
    trials : int
        Size of the population: trials of an iteration. The source gives the first ones.
    iterations : int
        Number of iterations.
    epochs : int
        Epochs of one iteration.
    mutations : mapping of str to Mutation
        Mutations by parameter; all other parameters stay unchanged.
    """

    trials: int
    iterations: int
    epochs: int
    mutations: Mapping[str, Mutation]
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(2, trials=self.trials)
        at_least(1, iterations=self.iterations, epochs=self.epochs)

    @property
    def slots(self) -> int:
        """Most trials that it ever begins: a population, then mutants of all but one in each iteration."""
        return self.trials + (self.iterations - 1) * (self.trials - 1)

    def likely_epochs(self) -> tuple[int, ...]:
        """Return the epochs of each trial beyond its parent's: half of a population goes on."""
        return (self.epochs,) * self.slots

    def next_trial(self, history: TrialHistory) -> Trial | NewTrial | None:
        """Return the next trial of the current iteration (CEREBRO, appendix 11)."""
        for iteration in range(1, self.iterations + 1):
            asked = history.rung(iteration * self.epochs)
            if len(asked) < self.trials:
                return self._member(history, iteration, len(asked))
            if any(loss is None for loss in asked.values()):
                return None
        return None

    def _member(self, history: TrialHistory, iteration: int, place: int) -> Trial | NewTrial | None:
        """Return a trial of an iteration: first the better half, then its mutants."""
        epochs = iteration * self.epochs
        if iteration == 1:
            return NewTrial(epochs)
        before = epochs - self.epochs
        better = history.ranked(before)[: self.trials - self.trials // 2]
        if not better:
            return None
        if place < len(better):
            return replace(history.trials[better[place]], epochs=epochs)
        # The draw depends on the mutant's number alone, so a restored search repeats it.
        number = len(history.trials)
        draw = draws(self.seed, number)
        parent = better[int(draw.random() * len(better))]
        config = {
            name: self.mutations[name].of(value, share) if name in self.mutations else value
            for name, value in history.trials[parent].config.items()
            for share in [draw.random()]
        }
        return Trial(number, config, epochs, Parent(parent, before))
