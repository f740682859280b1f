"""Population-based tuning as CEREBRO runs it (appendix 11; Jaderberg et al., 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hetctl.methods.automl.procedure import Method, NewTrial, TrialSource
from hetctl.methods.automl.rules import at_least
from hetctl.methods.automl.space import draws
from hetctl.methods.automl.trial_history import Parent, Trial, TrialHistory
from hetctl.model.errors import BadInputError


@dataclass(frozen=True)
class Mutation:
    """How a value changes from a parent to its child.

    Parameters
    ----------
    steps : tuple of float
        One of them is added (CEREBRO), each equally likely.
    low, high : float
        The result is kept within these; a whole number stays one.
    multiply : bool
        The value is multiplied by the step instead (Jaderberg et al., section 4.1.1: 0.8 or 1.2).
    """

    steps: tuple[float, ...]
    low: float
    high: float
    multiply: bool = False

    def __post_init__(self) -> None:
        if not self.steps:
            raise BadInputError("a mutation has no steps, but must have at least one")
        if not self.low <= self.high:
            raise BadInputError(f"a mutation keeps values from {self.low} to {self.high}, which holds none")

    def of(self, value: float, share: float) -> float:
        """Return the changed value; the step is the one at a share from 0 up to, but not including, 1."""
        step = self.steps[int(share * len(self.steps))]
        changed = value * step if self.multiply else value + step
        kept = min(max(changed, self.low), self.high)
        return round(kept) if isinstance(value, int) else kept


@dataclass(frozen=True)
class Pbt(Method):
    """After each iteration mutants of the better half take the places of the lower half.

    A mutant begins with its parent's weights. The next iteration waits for all reports of the last.
    Failed trials are in the lower half; if more fail, more are replaced.

    Parameters
    ----------
    population : int
        Trials of an iteration; the first ones come from the source.
    iterations : int
        How often they train.
    epochs : int
        Of one iteration.
    mutations : mapping of str to Mutation
        By parameter; the others stay as they are.
    """

    population: int
    iterations: int
    epochs: int
    mutations: Mapping[str, Mutation]
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(2, population=self.population)
        at_least(1, iterations=self.iterations, epochs=self.epochs)

    @property
    def fresh(self) -> int:
        """How many configurations it takes from the source."""
        return self.population

    def check(self, source: TrialSource) -> None:
        """Raise BadInputError if a parameter that mutates is not a number of the space."""
        super().check(source)
        for name in self.mutations:
            parameter = source.space.get(name)
            if parameter is None or not parameter.is_number:
                raise BadInputError(f"{name} cannot mutate: it is not a number of the space")

    def next_trial(self, history: TrialHistory) -> Trial | NewTrial | None:
        """Ask for the next trial of the iteration that is under way."""
        for iteration in range(1, self.iterations + 1):
            asked = history.rung(iteration * self.epochs)
            if len(asked) < self.population:
                return self._member(history, iteration, len(asked))
            if any(loss is None for loss in asked.values()):
                return None
        return None

    def _member(self, history: TrialHistory, iteration: int, place: int) -> Trial | NewTrial | None:
        """Return a trial of an iteration: first those of the better half, then their mutants."""
        epochs = iteration * self.epochs
        if iteration == 1:
            return NewTrial(epochs)
        before = epochs - self.epochs
        better = history.ranked(before)[: self.population - self.population // 2]
        if not better:
            return None
        if place < len(better):
            return replace(history.trials[better[place]], epochs=epochs)
        number = len(history.trials)
        draw = draws(self.seed, number)
        parent = better[int(draw.random() * len(better))]
        config = {
            name: self._mutated(name, value, draw.random())
            for name, value in history.trials[parent].config.items()
        }
        return Trial(number, config, epochs, Parent(parent, before))

    def _mutated(self, name: str, value: Any, share: float) -> Any:
        return self.mutations[name].of(value, share) if name in self.mutations else value
