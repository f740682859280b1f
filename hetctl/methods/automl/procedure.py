"""The template of every AutoML procedure (CEREBRO, section 3): ask what to train, tell how it went."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hetctl.methods.automl.space import Space
from hetctl.methods.automl.trial_history import Config, Event, Report, Trial, TrialHistory
from hetctl.model.errors import BadInputError
from hetctl.model.serialization import decode, encode


@dataclass(frozen=True)
class NewTrial:
    """The wish for a new configuration from the source, trained for so many epochs."""

    epochs: int


class TrialSource(Protocol):
    """Where new configurations come from; every source is a frozen dataclass of its settings."""

    @property
    def space(self) -> Space:
        """The hyper-parameters that a configuration has."""

    @property
    def size(self) -> int | None:
        """How many configurations there are; None if there is no end."""

    def follow(self, history: TrialHistory) -> Callable[[int], Config]:
        """Return what gives a new trial's configuration by its number.

        It may learn from the history, which grows, and depends on nothing else.
        """


class Method(ABC):
    """A published method; every one is a frozen dataclass of its settings."""

    @property
    @abstractmethod
    def fresh(self) -> int:
        """How many configurations it takes from the source."""

    @abstractmethod
    def next_trial(self, history: TrialHistory) -> Trial | NewTrial | None:
        """Return what should train next, from the history alone; None: nothing before more is reported."""

    def check(self, source: TrialSource) -> None:
        """Raise BadInputError if the source has not what this method needs."""
        if source.size is not None and source.size < self.fresh:
            raise BadInputError(
                f"{type(self).__name__} takes {self.fresh} configurations, but there are only {source.size}",
                hint="list more values, or draw them at random",
            )


@dataclass(frozen=True)
class State:
    """All that a search needs to go on."""

    method: Any
    source: Any
    events: tuple[Event, ...]


class Procedure:
    """A search: a method with a source of configurations.

    Both decide from the history alone. So it is the history that is saved, and a restored procedure
    goes on like one that was never interrupted.

    Parameters
    ----------
    state : Any
        What `state` of an interrupted search was; None begins a new one.

    Raises
    ------
    BadInputError
        If the source has not what the method needs, or the state is of another search.
    """

    def __init__(self, method: Method, source: TrialSource, state: Any = None) -> None:
        method.check(source)
        self._method, self._source = method, source
        self.history = TrialHistory() if state is None else self._restored(state)
        self._config = source.follow(self.history)

    @property
    def state(self) -> Any:
        """All that is needed to go on, in JSON's types."""
        return encode(State(_settings(self._method), _settings(self._source), tuple(self.history.events)))

    @property
    def done(self) -> bool:
        """Whether everything was asked for and reported."""
        return not self.history.waiting and self._method.next_trial(self.history) is None

    def ask(self, most: int | None = None) -> tuple[Trial, ...]:
        """Return what should train besides `history.waiting`, the most urgent first.

        Parameters
        ----------
        most : int or None
            How many trials can be taken; None: as many as there are.
        """
        asked = list[Trial]()
        while most is None or len(asked) < most:
            wish = self._method.next_trial(self.history)
            if wish is None:
                break
            asked.append(self._trial(wish))
            self.history.ask(asked[-1])
        return tuple(asked)

    def tell(self, report: Report) -> bool:
        """Take a report; say whether it counts.

        The first report of what was asked for does. Later ones do not: neither the same again, nor the
        result of a trial that had been given up. A failed trial is never asked for again.

        Raises
        ------
        BadInputError
            If that was never asked for.
        """
        return self.history.tell(report)

    def _trial(self, wish: Trial | NewTrial) -> Trial:
        if isinstance(wish, Trial):
            return wish
        number = len(self.history.trials)
        return Trial(number, self._config(number), wish.epochs)

    def _restored(self, data: Any) -> TrialHistory:
        try:
            state = decode(State, data)
            history = TrialHistory(state.events)
        except (ValueError, IndexError) as error:
            raise BadInputError(f"the state of the search cannot be read: {error}") from None
        for part, saved in ((self._method, state.method), (self._source, state.source)):
            if saved != _settings(part):
                raise BadInputError(
                    f"the state is of another search: it has {saved}, but was given to {_settings(part)}",
                    hint="go on with the settings that the search began with",
                )
        return history


def _settings(part: Method | TrialSource) -> Any:
    return {"name": type(part).__name__, **encode(part)}
