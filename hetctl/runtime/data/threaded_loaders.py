"""Loaders whose thread makes batches ahead of the trainer: of a ``collate_fn``, and of shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from hetctl.model.errors import BadInputError, HetctlError
from hetctl.runtime.data.loaders import Batch, Loader, Samples
from hetctl.runtime.data.named_arrays import CollatedSource
from hetctl.runtime.data.preprocessors import FILE_SYSTEM
from hetctl.runtime.data.sampler import Chunk, Order, Stream, epoch_order, parts_of
from hetctl.runtime.data.shards import ShardPlan, ShardReader, ShardSource, Span

BATCHES_AHEAD = 2
"""Batches that are made while the trainer uses another one."""

Make = Callable[[], Samples]

Piece = tuple[int, Span]
"""Lane, and the samples that it reads."""


@dataclass(frozen=True)
class Ahead:
    """A chunk that is being made; of shards, this rank's pieces of it, and the plan after it."""

    chunk: Chunk
    made: Future[Samples]
    pieces: tuple[Piece, ...] = ()
    plan: Any = None


class ThreadedLoader(Loader):
    """Loader whose thread makes the next batches.

    Parameters
    ----------
    patience_s : float
        Time limit in seconds for a batch.
    """

    def __init__(self, source: CollatedSource | ShardSource, patience_s: float) -> None:
        super().__init__(len(source), source.sample)
        self._thread = BatchThread(patience_s)
        self._ahead: deque[Ahead] = deque()

    def close(self) -> None:
        """Let the thread end after the batch that it is making, which is not awaited."""
        self._drop()
        self._thread.close()

    def _drop(self) -> None:
        while self._ahead:
            self._ahead.popleft().made.cancel()


class CollatedLoader(ThreadedLoader):
    """Batches of a `CollatedSource`.

    Until a batch is made it consists of numbers, so that the chunks of an epoch, their order, and the ranks'
    shares are those of arrays. What is made ahead is dropped if the sizes change, or another position is
    requested.
    """

    def __init__(self, source: CollatedSource, stream: Stream, patience_s: float) -> None:
        super().__init__(source, patience_s)
        self._source = source
        self._own = stream
        self._stream = stream
        self._asked = 0

    def batches(self, epoch: int, start: int, order: Order | None = None) -> Generator[Batch, None, None]:
        """Yield batches with memory of their own."""
        order = order or (self._own.seed, epoch)
        while start < self.samples:
            found = self._upcoming(order, start)
            yield self._thread.awaited(found.made), found.chunk
            start = found.chunk.stop

    def split(self, sizes: tuple[int, ...]) -> None:
        """Use these sizes from the next chunk on."""
        self._own = replace(self._own, sizes=sizes)

    def _upcoming(self, order: Order, start: int) -> Ahead:
        """Return the chunk at a position; have those after it made."""
        if not self._is_next(order, start):
            self._drop()
            self._stream, self._asked = self._own.beginning_at(order, start), 0
        while len(self._ahead) <= BATCHES_AHEAD:
            chunk = self._stream.at(self._asked)
            self._ahead.append(Ahead(chunk, self._thread.ask(partial(self._made, chunk))))
            self._asked += 1
        return self._ahead.popleft()

    def _is_next(self, order: Order, start: int) -> bool:
        if not self._ahead or self._stream.split != self._own.split:
            return False
        chunk = self._ahead[0].chunk
        return (chunk.order, chunk.start) == (order, start)

    def _made(self, chunk: Chunk) -> Samples:
        numbers = chunk.numbers.tolist()
        return self._source.batch(numbers) if numbers else self.sample


class ShardLoader(ThreadedLoader):
    """Batches of a `ShardSource`.

    The order of a chunk says which shards are begun after it, and what is left of them, so that training
    goes on to the sample from there with any number of ranks. When sizes change, what was planned ahead is
    planned anew; samples that were read are kept for that.
    """

    def __init__(self, source: ShardSource, stream: Stream, patience_s: float) -> None:
        super().__init__(source, patience_s)
        self._source, self._stream = source, stream
        self._readers = ShardReaders(source)
        self._place: tuple[Order, int] = (stream.seed, 1), 0
        self._done = self._plan_at(*self._place)

    def batches(self, epoch: int, start: int, order: Order | None = None) -> Generator[Batch, None, None]:
        """Yield batches with memory of their own."""
        order = order or self._order_at(epoch, start)
        if self._place != (order, start):
            self._drop()
            self._done, self._place = self._plan_at(order, start), (order, start)
        elif self._ahead and self._ahead[0].chunk.start != start:
            # The trainer has left before it had trained the batch that it was given.
            self._drop()
        while start < self.samples:
            self._ask_ahead((order[0], order[1]), start)
            found = self._ahead.popleft()
            yield self._thread.awaited(found.made), found.chunk
            self._done, start = found.plan, found.chunk.stop
            self._place = found.chunk.order, start
        following = order[0], order[1] + 1
        self._done, self._place = self._plan_at(following, 0), (following, 0)
        self._ask_ahead(following, 0)

    def split(self, sizes: tuple[int, ...]) -> None:
        """Use these sizes from the next chunk on."""
        if sizes != self._stream.split:
            self._drop()
        self._stream = replace(self._stream, sizes=sizes)

    def _order_at(self, epoch: int, start: int) -> Order:
        """Return the order after the first chunks of an epoch, if it is trained with the present sizes."""
        plan = self._plan_at((self._stream.seed, epoch), 0)
        for begin in range(0, start, self._stream.chunk):
            for rank in range(self._stream.ranks):
                self._pieces(plan, rank, begin, min(begin + self._stream.chunk, start))
        return plan.encoded(self._stream.seed, epoch) if start else (self._stream.seed, epoch)

    def _plan_at(self, order: Order, start: int) -> ShardPlan:
        """Return the plan at a position; BadInputError if the shards have changed since."""
        seed, epoch, *_ = order
        shards = epoch_order(len(self._source.sizes), seed, epoch).tolist()
        lanes = self._stream.ranks * self._source.mix
        plan = ShardPlan.decoded(order, shards, self._source.sizes, lanes)
        if plan.samples_left != self.samples - start:
            raise BadInputError(
                f"the shards have {plan.samples_left} samples left in epoch {epoch}, where the checkpoint has"
                f" {self.samples - start}",
                "give the shards with which it was begun, or start a new run with `hetctl submit --new`",
            )
        return plan

    def _ask_ahead(self, epoch: tuple[int, int], start: int) -> None:
        """Have the next chunks made, of which some may be asked for already."""
        while len(self._ahead) <= BATCHES_AHEAD:
            last = self._ahead[-1] if self._ahead else None
            begin = last.chunk.stop if last else start
            if begin == self.samples:
                return
            self._ahead.append(self._asked((last.plan if last else self._done).copy(), epoch, begin))

    def _asked(self, plan: ShardPlan, epoch: tuple[int, int], start: int) -> Ahead:
        """Plan the next chunk, and have this rank's part of it made."""
        stop = min(start + self._stream.chunk, self.samples)
        of_ranks = [self._pieces(plan, rank, start, stop) for rank in range(self._stream.ranks)]
        mine = of_ranks[self._stream.rank]
        chunk = Chunk(plan.encoded(*epoch), start, stop, self._source.numbers([span for _, span in mine]))
        made = self._thread.ask(partial(self._readers.make, mine, self._needed(mine)))
        return Ahead(chunk, made, tuple(mine), plan)

    def _pieces(self, plan: ShardPlan, rank: int, start: int, stop: int) -> list[Piece]:
        """Take a rank's part of a chunk from the plan."""
        share = replace(self._stream, rank=rank).share(start, stop)
        counts = parts_of(share.stop - share.start, (1,) * self._source.mix)
        lanes = enumerate(counts, start=rank * self._source.mix)
        return [(lane, span) for lane, count in lanes for span in plan.take(lane, count)]

    def _needed(self, mine: Sequence[Piece]) -> dict[tuple[int, int], int]:
        """Return what this rank reads, or reads again if it plans anew: position by lane and shard."""
        first = self._stream.rank * self._source.mix
        rests = [(lane, self._done.rest_of(lane)) for lane in range(first, first + self._source.mix)]
        needed = {(lane, rest.shard): rest.start for lane, rest in rests if rest}
        for lane, span in (*(piece for ahead in self._ahead for piece in ahead.pieces), *mine):
            needed.setdefault((lane, span.shard), span.start)
        return needed


class ShardReaders:
    """Open shards of a rank; only its thread uses them."""

    def __init__(self, source: ShardSource) -> None:
        self._source = source
        self._open: dict[tuple[int, int], ShardReader] = {}

    def make(self, pieces: Sequence[Piece], needed: Mapping[tuple[int, int], int]) -> Samples:
        """Return a batch.

        Parameters
        ----------
        needed : mapping
            Shards, by lane, that are still read, each with the position from which samples may be asked for.
        """
        samples = [sample for lane, span in pieces for sample in self._read(lane, span, needed)]
        for key in self._open.keys() - needed.keys():
            self._open.pop(key).close()
        return self._source.batch(samples) if samples else self._source.sample

    def _read(self, lane: int, span: Span, needed: Mapping[tuple[int, int], int]) -> list[Any]:
        key = lane, span.shard
        if key not in self._open:
            self._open[key] = ShardReader(self._source, span.shard)
        return self._open[key].take(span.start, span.stop, needed[key])


class BatchThread:
    """Thread that calls functions in their order; it starts with the first one.

    Parameters
    ----------
    patience_s : float
        Time limit in seconds for a batch.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._orders: SimpleQueue[tuple[Make, Future[Samples]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def ask(self, make: Make) -> Future[Samples]:
        """Have a batch made; it can be cancelled until then."""
        if self._thread is None:
            # A daemon: a read that hangs must not keep the process from its end.
            self._thread = Thread(target=self._make_all, name="batches", daemon=True)
            self._thread.start()
        made = Future[Samples]()
        self._orders.put((make, made))
        return made

    def awaited(self, made: Future[Samples]) -> Samples:
        """Return a batch; HetctlError if it is not made in time, or the error of its function."""
        if not wait([made], self._patience_s).done:
            raise HetctlError(f"no batch was made in {self._patience_s:g} s", FILE_SYSTEM)
        return made.result()

    def close(self) -> None:
        """Let the thread end after the batch that it is making, which is not awaited."""
        self._orders.put(None)

    def _make_all(self) -> None:
        while (order := self._orders.get()) is not None:
            make, made = order
            if not made.set_running_or_notify_cancel():
                continue
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)
            # A batch would stay in memory until the next one is asked for.
            del order, make, made
