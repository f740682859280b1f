"""The ask-and-tell template of every AutoML procedure (CEREBRO, section 3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from hetctl.methods.automl.trials import Config, Report, Space, Trial, TrialEvent, TrialHistory
from hetctl.model.errors import BadInputError
from hetctl.model.serialization import decode, encode


@dataclass(frozen=True)
class NewTrial:
    """Request for a new configuration from the source, to be trained for the given epochs."""

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
        """Return a function from a new trial's number to its configuration.

        The function may learn from the history, which grows, and depends on nothing else.
        """


class Method(ABC):
    """A published search method; each implementation is a frozen dataclass of its settings."""

    @property
    @abstractmethod
    def fresh(self) -> int:
        """Number of configurations that the method takes from the source."""

    @property
    def slots(self) -> int:
        """Most trials that it ever begins."""
        return self.fresh

    @abstractmethod
    def likely_epochs(self) -> tuple[int, ...]:
        """Return the epochs that each trial is likely to get, by number, for predictions."""

    @abstractmethod
    def next_trial(self, history: TrialHistory) -> Trial | NewTrial | None:
        """Return the next trial, from the history alone; None if there is none before further reports."""

    def check(self, source: TrialSource) -> None:
        """Raise BadInputError if the source lacks something that this method needs."""
        if source.size is not None and source.size < self.fresh:
            raise BadInputError(
                f"{type(self).__name__} takes {self.fresh} configurations, but there are only {source.size}",
                hint="list more values, or draw them at random",
            )


@dataclass(frozen=True)
class State:
    """Complete state of a search."""

    method: Any
    source: Any
    events: tuple[TrialEvent, ...]


class Procedure:
    """A search: a method with a source of configurations.

    Both decide from the history alone. Therefore saving the history is enough, and a restored procedure
    continues as if it had not been interrupted.

    Parameters
    ----------
    state : Any
        Value of `state` of an interrupted search; None for a new search.

    Raises
    ------
    BadInputError
        If the source lacks what the method needs, or the state belongs to another search.
    """

    def __init__(self, method: Method, source: TrialSource, state: Any = None) -> None:
        method.check(source)
        self._method, self._source = method, source
        self._follow(TrialHistory() if state is None else self._restored(state))

    @classmethod
    def following(cls, method: Method, source: TrialSource, events: Iterable[TrialEvent]) -> Procedure:
        """Return a procedure that goes on after a history."""
        procedure = cls(method, source)
        procedure._follow(TrialHistory(events))
        return procedure

    def _follow(self, history: TrialHistory) -> None:
        self.history = history
        self._config = self._source.follow(history)

    @property
    def state(self) -> Any:
        """State of the search in JSON's types."""
        return encode(State(_settings(self._method), _settings(self._source), tuple(self.history.events)))

    @property
    def done(self) -> bool:
        """True if all trials were asked for and reported."""
        return not self.history.waiting and self._method.next_trial(self.history) is None

    def ask(self, most: int | None = None) -> tuple[Trial, ...]:
        """Return the trials to train besides `history.waiting`, the most urgent first.

        Parameters
        ----------
        most : int or None
            Most trials to return; None for all that are available.
        """
        asked = list[Trial]()
        while most is None or len(asked) < most:
            requested = self._method.next_trial(self.history)
            if requested is None:
                break
            asked.append(self._trial(requested))
            self.history.ask(asked[-1])
        return tuple(asked)

    def tell(self, report: Report) -> bool:
        """Take a report and return true if it counts.

        Only the first report of a requested trial counts. Later ones do not: neither a repeated report, nor
        the result of a trial that had been given up. A failed trial is not asked for again.

        Raises
        ------
        BadInputError
            If the trial was not asked for with these epochs.
        """
        return self.history.tell(report)

    def _trial(self, requested: Trial | NewTrial) -> Trial:
        if isinstance(requested, Trial):
            return requested
        number = len(self.history.trials)
        return Trial(number, self._config(number), requested.epochs)

    def _restored(self, data: Any) -> TrialHistory:
        try:
            state = decode(State, data)
            history = TrialHistory(state.events)
        # A history whose trials are not numbered in order raises IndexError.
        except (ValueError, IndexError) as error:
            raise BadInputError(f"the state of the search cannot be read: {error}") from None
        for part, saved in ((self._method, state.method), (self._source, state.source)):
            if saved != _settings(part):
                raise BadInputError(
                    f"the state belongs to another search: its settings are {saved}, not {_settings(part)}",
                    hint="continue with the settings with which the search began",
                )
        return history


def _settings(part: Method | TrialSource) -> Any:
    return {"name": type(part).__name__, **encode(part)}


def at_least(least: int, **settings: int) -> None:
    """Raise BadInputError for the first setting below `least`."""
    for name, value in settings.items():
        if value < least:
            raise BadInputError(f"{name} is {value}, but must be at least {least}")
