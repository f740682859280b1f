"""Random search: independently drawn values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetctl.methods.automl.space import Space, draws
from hetctl.methods.automl.trial_history import Config, TrialHistory


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
