"""Grid and random search: sources that do not learn from reports, and trials of equal epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from hetctl.methods.automl.procedure import Method, NewTrial, at_least
from hetctl.methods.automl.trials import (
    Categorical,
    Config,
    Space,
    TrialHistory,
    Value,
    active_part,
    draws,
)
from hetctl.model.values import dataclass


@dataclass(frozen=True)
class GridSource:
    """Grid of a space with listed values; the last parameter changes fastest."""

    space: Mapping[str, Categorical]

    @property
    def size(self) -> int:
        """Number of combinations."""
        return math.prod(len(choice.values) for choice in self.space.values())

    def config(self, number: int) -> Config:
        """Return the combination with this number, from 0."""
        values_at = dict[str, Value]()
        for name, choice in reversed(dict(self.space).items()):
            number, at = divmod(number, len(choice.values))
            values_at[name] = choice.values[at]
        return dict(reversed(values_at.items()))

    def follow(self, _history: TrialHistory) -> Callable[[int], Config]:
        """Return `config`: a grid does not depend on the history."""
        return self.config


@dataclass(frozen=True)
class RandomSource:
    """Unlimited random draws; each depends on the seed and its number alone.

    Parameters
    ----------
    start : tuple of mapping
        Values of the first configurations; what they leave out is drawn.
    """

    space: Space
    seed: int = 0
    start: tuple[Config, ...] = ()

    @property
    def size(self) -> None:
        """None: the number of draws is unlimited."""

    def config(self, number: int) -> Config:
        """Return the draw with this number."""
        draw = draws(self.seed, number)
        drawn = {name: parameter.at(draw.random()) for name, parameter in self.space.items()}
        given = self.start[number] if number < len(self.start) else {}
        return active_part(self.space, {**drawn, **given})

    def follow(self, _history: TrialHistory) -> Callable[[int], Config]:
        """Return `config`: the draws do not depend on the history."""
        return self.config


@dataclass(frozen=True)
class OneShot(Method):
    """The one-shot instance of CEREBRO's template.

    Parameters
    ----------
    trials : int
        Number of configurations.
    epochs : int
        Epochs of each configuration.
    """

    trials: int
    epochs: int

    def __post_init__(self) -> None:
        at_least(1, trials=self.trials, epochs=self.epochs)

    def likely_epochs(self) -> tuple[int, ...]:
        """Return the epochs of each trial."""
        return (self.epochs,) * self.trials

    def next_trial(self, history: TrialHistory) -> NewTrial | None:
        """Return the next configuration, independent of earlier results (CEREBRO, section 3)."""
        return NewTrial(self.epochs) if len(history.trials) < self.trials else None
