"""Fold of events in order of time, independent of the order in which they are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from hetctl.model.events import Event, Order, in_order
from hetctl.storage.snapshot import StaleSnapshotError

S = TypeVar("S")


class OrderedFold(Generic[S]):
    """State that results from folding events one after another in order of time.

    Files are read one by one, and the clocks of nodes differ: if an event is older than one that was folded
    before it, all events are folded again, so that the result always equals that of one pass in order.

    Parameters
    ----------
    start : S
        State before the first event; values of S are never changed in place.
    step : callable
        Function from a state and the next event to the next state.
    until : Order or None
        Position of the last event included in `start`; None: it includes none.
    """

    __slots__ = ("_events", "_start", "_step", "_until", "state")

    def __init__(self, start: S, step: Callable[[S, Event], S], until: Order | None = None) -> None:
        self._start, self._step, self._until = start, step, until
        self._events: list[Event] = []
        self.state = start

    def onward(self, state: S, until: Order) -> OrderedFold[S]:
        """Return a fold with the same step function that continues from a state."""
        return OrderedFold(state, self._step, until)

    @property
    def last(self) -> Order | None:
        """Position of the last event so far; None if there is none."""
        return self._events[-1].order if self._events else self._until

    def add(self, events: Iterable[Event]) -> None:
        """Fold more events, in any order.

        Raises
        ------
        StaleSnapshotError
            If an event belongs before the last one included in `start`.
        """
        new = in_order(events)
        if self._until is not None and new[0].order < self._until:
            raise StaleSnapshotError
        late = bool(self._events) and new[0].order < self._events[-1].order
        self._events = in_order([*self._events, *new]) if late else [*self._events, *new]
        todo, start = (self._events, self._start) if late else (new, self.state)
        self.state = functools.reduce(self._step, todo, start)
