"""Sources that do not learn from reports: a grid of listed values, and independent random draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hetctl.methods.automl.space import Categorical, Space, Value, draws
from hetctl.methods.automl.trial_history import Config, TrialHistory
from hetctl.model.errors import BadInputError


@dataclass(frozen=True)
class GridSource:
    """Grid of a space that lists all its values; the last parameter changes fastest."""

    space: Space

    def __post_init__(self) -> None:
        for name, parameter in self.space.items():
            if not isinstance(parameter, Categorical):
                raise BadInputError(f"{name} is a range, but a grid needs its values listed")

    @property
    def size(self) -> int:
        """Number of combinations."""
        return math.prod(len(values) for values in self._values().values())

    def config(self, number: int) -> Config:
        """Return the combination with this number, counted from 0."""
        values_at = dict[str, Value]()
        for name, values in reversed(self._values().items()):
            number, at = divmod(number, len(values))
            values_at[name] = values[at]
        return dict(reversed(values_at.items()))

    def follow(self, _history: TrialHistory) -> Callable[[int], Config]:
        """Return `config`: a grid does not depend on the history."""
        return self.config

    def _values(self) -> dict[str, tuple[Value, ...]]:
        return {name: choice.values for name, choice in self.space.items() if isinstance(choice, Categorical)}


@dataclass(frozen=True)
class RandomSource:
    """Unlimited random draws; each depends only on the seed and its number."""

    space: Space
    seed: int = 0

    @property
    def size(self) -> None:
        """None: the number of draws is unlimited."""

    def config(self, number: int) -> Config:
        """Return the draw with this number."""
        draw = draws(self.seed, number)
        return {name: parameter.at(draw.random()) for name, parameter in self.space.items()}

    def follow(self, _history: TrialHistory) -> Callable[[int], Config]:
        """Return `config`: the draws do not depend on the history."""
        return self.config
