"""What a ``train_fn`` iterates over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from hetctl.runtime.feeds import Feed, Samples
from hetctl.runtime.group import Group
from hetctl.runtime.stream import Order


class Batches:
    """The share that a rank has of one epoch's batches.

    Iteration ends with the epoch, or sooner when `should_stop` says so on rank 0; `position` then
    tells how many samples of the epoch are done. What a batch holds may change as soon as the next one
    is asked for.

    Parameters
    ----------
    start : int
        Samples of the epoch that were done before.
    on_step : callable
        Called after each step with the samples that the whole group has done so far.
    order : Order or None
        In which those before `start` were trained; then, of the epoch as it is trained.

    A ``train_fn`` may set `loss` to that of its last batch, as its framework has it, for people to see.
    """

    def __init__(
        self,
        feed: Feed,
        epoch: int,
        start: int,
        group: Group,
        should_stop: Callable[[], bool],
        on_step: Callable[[int], None] = lambda _position: None,
        order: Order | None = None,
    ) -> None:
        self._feed = feed
        self._epoch = epoch
        self.order = order
        self._group = group
        self._should_stop = should_stop
        self._on_step = on_step
        self.start = start
        self.position = start
        self.weight = 1.0
        self.loss: Any = None

    @property
    def complete(self) -> bool:
        """Whether the epoch is done."""
        return self.position == self._feed.samples

    def __iter__(self) -> Iterator[Samples]:
        with closing(self._feed.batches(self._epoch, self.position, self.order)) as batches:
            while not self.complete and not self._group.agree(self._should_stop()):
                samples, chunk = next(batches)
                self.weight, self.order = chunk.weight, chunk.order
                yield samples
                self.position = chunk.stop
                self._on_step(self.position)
            if self.complete:
                next(batches, None)  # lets the feed go on to the next epoch


class Converted:
    """The same batches, each as a framework has it.

    Parameters
    ----------
    convert : callable
        Called with each batch just before it is trained.
    """

    def __init__(self, batches: Batches, convert: Callable[[Samples], Any]) -> None:
        self._batches = batches
        self._convert = convert

    @property
    def loss(self) -> Any:
        """Of the last batch."""
        return self._batches.loss

    @loss.setter
    def loss(self, value: Any) -> None:
        self._batches.loss = value

    def __iter__(self) -> Iterator[Any]:
        return map(self._convert, self._batches)
