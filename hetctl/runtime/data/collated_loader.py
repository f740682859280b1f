"""A rank's batches that a ``collate_fn`` makes, in a thread ahead of the trainer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, wait
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread

from hetctl.model.errors import BadInputError, HetctlError
from hetctl.runtime.data.collated import CollatedSource
from hetctl.runtime.data.loaders import Batch, Loader, Samples
from hetctl.runtime.data.preprocessors import FILE_SYSTEM
from hetctl.runtime.data.sampler import Chunk, Order, Stream

BATCHES_AHEAD = 2
"""Batches that are made while the trainer uses another one."""


class CollatedLoader:
    """Batches of a `CollatedSource`; a `Loader`.

    Until a batch is made it consists of numbers, so that the chunks of an epoch, their order, and the ranks'
    shares are those of arrays. What is made ahead is dropped if the sizes change, or another position is
    requested.

    Parameters
    ----------
    patience_s : float
        Time limit in seconds for a batch.
    """

    def __init__(self, source: CollatedSource, stream: Stream, patience_s: float) -> None:
        self.samples = len(source)
        self.sample = source.sample
        self.waited_s = 0.0
        self._source = source
        self._patience_s = patience_s
        self._own = stream
        self._stream = stream
        self._asked = 0
        self._ahead: deque[tuple[Chunk, Future[Samples]]] = deque()
        self._orders: SimpleQueue[tuple[Chunk, Future[Samples]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def batches(self, epoch: int, start: int, order: Order | None = None) -> Generator[Batch, None, None]:
        """Yield batches with memory of their own."""
        order = order or (self._own.seed, epoch)
        while start < self.samples:
            chunk, made = self._upcoming(order, start)
            yield self._awaited(made), chunk
            start = chunk.stop

    def split(self, sizes: tuple[int, ...]) -> None:
        """Use these sizes from the next chunk on."""
        self._own = replace(self._own, sizes=sizes)

    def close(self) -> None:
        """Let the thread end after the batch that it is making, which is not awaited."""
        self._drop()
        self._orders.put(None)

    def _upcoming(self, order: Order, start: int) -> tuple[Chunk, Future[Samples]]:
        """Return the chunk at a position; have those after it made."""
        if not self._is_next(order, start):
            self._drop()
            self._stream, self._asked = self._own.beginning_at(order, start), 0
        while len(self._ahead) <= BATCHES_AHEAD:
            self._ask(self._stream.at(self._asked))
            self._asked += 1
        return self._ahead.popleft()

    def _is_next(self, order: Order, start: int) -> bool:
        if not self._ahead or self._stream.split != self._own.split:
            return False
        chunk, _ = self._ahead[0]
        return (chunk.order, chunk.start) == (order, start)

    def _ask(self, chunk: Chunk) -> None:
        if self._thread is None:
            # A daemon: a read that hangs must not keep the process from its end.
            self._thread = Thread(target=self._make_all, name="collate", daemon=True)
            self._thread.start()
        order = chunk, Future[Samples]()
        self._ahead.append(order)
        self._orders.put(order)

    def _drop(self) -> None:
        while self._ahead:
            self._ahead.popleft()[1].cancel()

    def _awaited(self, made: Future[Samples]) -> Samples:
        began = time.perf_counter()
        in_time = wait([made], self._patience_s).done
        self.waited_s += time.perf_counter() - began
        if not in_time:
            raise HetctlError(f"no batch was collated in {self._patience_s:g} s", FILE_SYSTEM)
        return made.result()

    def _make_all(self) -> None:
        """Make the batches that were asked for, in order."""
        while (order := self._orders.get()) is not None:
            chunk, made = order
            if not made.set_running_or_notify_cancel():
                continue
            try:
                numbers = chunk.numbers.tolist()
                made.set_result(self._source.batch(numbers) if numbers else self.sample)
            except BaseException as error:
                made.set_exception(error)
            # A batch would stay in memory until the next one is asked for.
            del order, made


def refuse_collated(loader: Loader, reader: str) -> None:
    """Refuse batches of a ``collate_fn`` where all must have one shape.

    Raises
    ------
    BadInputError
        If they are; `reader` names what needs one shape.
    """
    if isinstance(loader, CollatedLoader):
        raise BadInputError(
            f"input_fn returned samples with a collate_fn, and {reader} needs batches of one shape",
            "return arrays or a dataset of pairs (x, y), or train the member without a pipeline",
        )
