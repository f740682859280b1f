"""Values drawn at random, each for itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetctl.methods.automl.space import Space, draws
from hetctl.methods.automl.trial_history import Config, TrialHistory


@dataclass(frozen=True)
class RandomSource:
    """Draws without end; each depends on the seed and its number alone."""

    space: Space
    seed: int = 0

    @property
    def size(self) -> None:
        """There is no end."""

    def config(self, number: int) -> Config:
        """Return draw `number`."""
        draw = draws(self.seed, number)
        return {name: parameter.at(draw.random()) for name, parameter in self.space.items()}

    def follow(self, _history: TrialHistory) -> Callable[[int], Config]:
        """Return `config`: nothing is learned."""
        return self.config
