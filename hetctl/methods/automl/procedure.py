"""The ask-and-tell template of AutoML procedures (CEREBRO, section 3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Protocol

from hetctl.methods.automl.trials import Config, Report, Space, Trial, TrialEvent, TrialHistory
from hetctl.model.errors import BadInputError
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
