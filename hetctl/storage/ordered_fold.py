"""Folding events in order of time, in whatever order they are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from hetctl.model.events import Event, Order, in_order
from hetctl.storage.snapshot import StaleSnapshotError

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
    until : Order or None
        Place of the last event that `start` holds already; None: it holds none.
    """

    __slots__ = ("_events", "_start", "_step", "_until", "state")

    def __init__(self, start: S, step: Callable[[S, Event], S], until: Order | None = None) -> None:
        self._start, self._step, self._until = start, step, until
        self._events: list[Event] = []
        self.state = start

    def onward(self, state: S, until: Order) -> OrderedFold[S]:
        """Return a fold by the same steps that goes on from a state."""
        return OrderedFold(state, self._step, until)

    @property
    def last(self) -> Order | None:
        """Place of the last event so far; None if there is none."""
        return self._events[-1].order if self._events else self._until

    def add(self, events: Iterable[Event]) -> None:
        """Fold more events, in any order.

        Raises
        ------
        StaleSnapshotError
            If one should have come before the last that `start` holds.
        """
        new = in_order(events)
        if self._until is not None and new[0].order < self._until:
            raise StaleSnapshotError
        late = bool(self._events) and new[0].order < self._events[-1].order
        self._events = in_order([*self._events, *new]) if late else [*self._events, *new]
        todo, start = (self._events, self._start) if late else (new, self.state)
        self.state = functools.reduce(self._step, todo, start)
