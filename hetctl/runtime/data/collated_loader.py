"""A rank's batches that a ``collate_fn`` makes, in a thread ahead of the trainer."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from hetctl.runtime.data.batch_thread import BATCHES_AHEAD, BatchThread
from hetctl.runtime.data.collated import CollatedSource
from hetctl.runtime.data.loaders import Batch, Samples
from hetctl.runtime.data.sampler import Chunk, Order, Stream


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
        self._source = source
        self._thread = BatchThread(patience_s)
        self._own = stream
        self._stream = stream
        self._asked = 0
        self._ahead: deque[tuple[Chunk, Future[Samples]]] = deque()

    @property
    def waited_s(self) -> float:
        """Time for which the trainer has waited for batches, in seconds."""
        return self._thread.waited_s

    def batches(self, epoch: int, start: int, order: Order | None = None) -> Generator[Batch, None, None]:
        """Yield batches with memory of their own."""
        order = order or (self._own.seed, epoch)
        while start < self.samples:
            chunk, made = self._upcoming(order, start)
            yield self._thread.awaited(made), chunk
            start = chunk.stop

    def split(self, sizes: tuple[int, ...]) -> None:
        """Use these sizes from the next chunk on."""
        self._own = replace(self._own, sizes=sizes)

    def close(self) -> None:
        """Let the thread end after the batch that it is making, which is not awaited."""
        self._drop()
        self._thread.close()

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
        self._ahead.append((chunk, self._thread.ask(partial(self._made, chunk))))

    def _drop(self) -> None:
        while self._ahead:
            self._ahead.popleft()[1].cancel()

    def _made(self, chunk: Chunk) -> Samples:
        numbers = chunk.numbers.tolist()
        return self._source.batch(numbers) if numbers else self.sample
