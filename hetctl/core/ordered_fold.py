"""Folding events in order of time, in whatever order they are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from hetctl.core.events import Event, in_order

S = TypeVar("S")


class OrderedFold(Generic[S]):
    """State of events, folded one after another in order of time.

    Files are read one by one, and clocks of nodes differ: an event that is older than one that was
    folded before it makes all be folded anew, so that the result is always that of one pass in order.

    Parameters
    ----------
    start : S
        The state before the first event; values of S are never changed in place.
    step : callable
        From a state and the next event to the next state.
    """

    __slots__ = ("_events", "_start", "_step", "state")

    def __init__(self, start: S, step: Callable[[S, Event], S]) -> None:
        self._start, self._step = start, step
        self._events: list[Event] = []
        self.state = start

    def add(self, events: Iterable[Event]) -> None:
        """Fold more events, in any order."""
        new = in_order(events)
        late = bool(self._events) and new[0].order < self._events[-1].order
        self._events = in_order([*self._events, *new]) if late else [*self._events, *new]
        todo, start = (self._events, self._start) if late else (new, self.state)
        self.state = functools.reduce(self._step, todo, start)
