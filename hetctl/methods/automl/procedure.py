"""The ask-and-tell template of AutoML procedures (CEREBRO, section 3), and its one-shot instance."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from hetctl.methods.automl.trials import (
    Categorical,
    Config,
    Report,
    Space,
    TrialEvent,
    TrialHistory,
    Value,
    active_part,
    draws,
)
from hetctl.model.errors import BadInputError
from hetctl.model.searches import Trial
from hetctl.model.values import dataclass


@dataclass(frozen=True)
class NewTrial:
    """Request to train a new configuration of the source for these epochs."""

    epochs: int


class TrialSource(Protocol):
    """Source of new configurations; each implementation is a frozen dataclass of its settings."""

    @property
    def space(self) -> Space:
        """Hyper-parameters of a configuration."""

    @property
    def size(self) -> int | None:
        """Number of configurations; None if unlimited."""

    def follow(self, history: TrialHistory) -> Callable[[int], Config]:
        """Return a function that gives a new trial's configuration by number.

        The function may learn from the growing history, and depends on nothing else.
        """


class Method(ABC):
    """Published search method; each implementation is a frozen dataclass of its settings.

    Attributes
    ----------
    trials : int
        Number of configurations from the source.
    """

    trials: int

    @property
    def slots(self) -> int:
        """Most trials that it ever begins."""
        return self.trials

    @abstractmethod
    def likely_epochs(self) -> tuple[int, ...]:
        """Return the likely epochs of each trial, by number, for predictions."""

    @abstractmethod
    def next_trial(self, history: TrialHistory) -> Trial | NewTrial | None:
        """Return the next trial, from the history alone; None before further reports."""

    def check(self, source: TrialSource) -> None:
        """Raise BadInputError if the source lacks what this method needs."""
        if source.size is not None and source.size < self.trials:
            raise BadInputError(
                f"{type(self).__name__} takes {self.trials} configurations, but there are only {source.size}",
                hint="list more values, or draw them at random",
            )


class Procedure:
    """Search: a method with a source of configurations.

    Both decide from the history alone: two procedures with the same events go on alike.

    Parameters
    ----------
    events : iterable of Trial and Report
        History of an interrupted search; empty for a new one.

    Raises
    ------
    BadInputError
        If the source lacks what the method needs, or does not draw the configurations of the history.
    """

    def __init__(self, method: Method, source: TrialSource, events: Iterable[TrialEvent] = ()) -> None:
        method.check(source)
        self._method = method
        self.history = TrialHistory(events)
        self._config = source.follow(self.history)

    @property
    def done(self) -> bool:
        """True if all trials were asked for and reported."""
        return not self.history.waiting and self._method.next_trial(self.history) is None

    def ask(self, most: int | None = None) -> tuple[Trial, ...]:
        """Return the trials to train beside `history.waiting`, the most urgent first.

        Parameters
        ----------
        most : int or None
            Most trials to return; None for all available ones.
        """
        asked = list[Trial]()
        while most is None or len(asked) < most:
            requested = self._method.next_trial(self.history)
            if requested is None:
                break
            if isinstance(requested, NewTrial):
                number = len(self.history.trials)
                requested = Trial(number, self._config(number), requested.epochs)
            self.history.ask(requested)
            asked.append(requested)
        return tuple(asked)

    def tell(self, report: Report) -> bool:
        """Take a report and return true if it counts.

        Only the first report of a request counts, not a repeated one or the late result of a trial that was
        given up. A failed trial is not asked for again.

        Raises
        ------
        BadInputError
            If the trial was not asked for with these epochs.
        """
        return self.history.tell(report)


def at_least(least: int, **settings: int) -> None:
    """Raise BadInputError for the first setting below `least`."""
    for name, value in settings.items():
        if value < least:
            raise BadInputError(f"{name} is {value}, but must be at least {least}")


class FixedSource(ABC):
    """Source whose configurations do not depend on the history."""

    @abstractmethod
    def config(self, number: int) -> Config:
        """Return the configuration with this number, from 0."""

    def follow(self, _history: TrialHistory) -> Callable[[int], Config]:
        """Return `config`."""
        return self.config


@dataclass(frozen=True)
class GridSource(FixedSource):
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


@dataclass(frozen=True)
class RandomSource(FixedSource):
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
