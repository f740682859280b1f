"""The path of a rank's samples from their source to its training steps.

A `Loader` goes through the chunks of an epoch. Its subclasses differ in where they get the batch of a
chunk: from arrays in memory, from rings that preprocessors fill, or from a thread.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from hetctl.model.errors import HetctlError
from hetctl.model.site import USUAL_TIMEOUTS, Timeouts
from hetctl.model.values import dataclass
from hetctl.runtime.data.preprocessors import FILE_SYSTEM, Preprocessors
from hetctl.runtime.data.round_inputs import Lockstep
from hetctl.runtime.data.sampler import Chunk, Numbers, Order, Stream, epoch_order, moved, reassigned
from hetctl.runtime.data.sharing.ring import Ring, RingShape, RingTimeoutError
from hetctl.runtime.data.sharing.shared_file import await_exchange, leader_fills
from hetctl.runtime.data.sources import Array, ArraySource
from hetctl.storage.atomic_io import write_private

Samples = tuple[Array, Array]
Batch = tuple[Samples, Chunk]

PREFETCH_SAMPLES = 2048
"""Samples that are prepared ahead, as in FLEET's queues (section 5)."""
RATE_OF_LEADER = "leader.rate"
"""File in a node's folder with the throughput of a preprocessor of its leader."""
RING_BYTES = 2**28
LEAST_SLOTS = 3
MAX_MOVED_SHARE = 0.1
"""Largest share of a chunk that may move between ranks before their preprocessors begin anew."""
CHECK_S, HELP_S = 1.0, 5.0
"""Usual waits of a rank for a chunk, as in `PreprocessorPool`."""


class Loader:
    """A rank's share of the batches of all epochs; this class itself is for a rank that reads no samples.

    Parameters
    ----------
    samples : int
        Samples of an epoch, for the whole group.
    sample : tuple of arrays
        A batch with one sample, as an example. A rank without a share trains it, to take part in the
        averaging.
    """

    def __init__(self, samples: int, sample: Samples) -> None:
        self.samples, self.sample = samples, sample

    def batches(self, epoch: int, start: int, order: Order | None = None) -> Generator[Batch, None, None]:  # noqa: ARG002
        """Yield the batches of an epoch after its first `start` samples.

        The memory of a batch may be overwritten as soon as the next batch is requested.

        Parameters
        ----------
        order : Order or None
            Order in which the first `start` samples were trained; None: the loader's own for that epoch.
        """
        yield from ()

    def split(self, sizes: tuple[int, ...]) -> None:
        """Split chunks by these sizes from the next request on, as in `Stream`.

        All ranks of the group must split the same chunk by the same sizes.
        """

    def is_in_order(self, ranks: int) -> bool:  # noqa: ARG002
        """Return true if so many ranks have the samples of each chunk in the order of the stream."""
        return False

    @property
    def preparation_rate(self) -> float | None:
        """Samples/s that one preprocessor prepares; None: not known yet, or none works for it."""
        return None

    def close(self) -> None:
        """Release the batches; no more are requested."""


class StreamLoader(Loader):
    """Batches of a stream of samples; some may be made ahead.

    Parameters
    ----------
    stream : Stream
        Order of the samples, and this rank's share of each chunk.
    """

    def __init__(self, sample: Samples, stream: Stream) -> None:
        super().__init__(stream.samples, sample)
        self._stream = self._running = stream
        self._position = 0
        self._place: tuple[Order, int] | None = None

    def batches(self, epoch: int, start: int, order: Order | None = None) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch, as in `Loader`."""
        order = order or self._order_at(epoch, start)
        while start < self.samples:
            # Batches made ahead, even of the next epoch, are kept if they come next.
            if self._place != (order, start):
                self._begin(order, start)
            samples, chunk = self._next()
            self._place = None
            yield samples if len(chunk.numbers) else self.sample, chunk
            self._release(chunk)
            self._position += 1
            order, start = chunk.order, chunk.stop
            self._place = (order, start) if start < self.samples else ((order[0], order[1] + 1), 0)

    def split(self, sizes: tuple[int, ...]) -> None:
        """Use these sizes from the next chunk on."""
        self._stream, self._running = replace(self._stream, sizes=sizes), replace(self._running, sizes=sizes)

    def is_in_order(self, ranks: int) -> bool:
        """Return true if the stream is one of so many ranks."""
        return self._stream.ranks == ranks

    def _order_at(self, epoch: int, _start: int) -> Order:
        """Return the loader's own order after the first samples of an epoch."""
        return self._stream.seed, epoch

    def _begin(self, order: Order, start: int) -> None:
        """Go to a place in an epoch."""
        seed, epoch = order
        self._running, self._position = replace(self._stream, seed=seed, epoch=epoch, start=start), 0

    def _next(self) -> Batch:
        """Return the batch at the position; it is valid until it is released."""
        raise NotImplementedError

    def _release(self, chunk: Chunk) -> None:
        """Release the batch at the position."""


class ArrayLoader(StreamLoader):
    """Copies of samples from two arrays; they need no preparation."""

    def __init__(self, source: ArraySource, stream: Stream) -> None:
        super().__init__(source.batch(np.array([0])), stream)
        self._source = source
        self._instead: dict[Order, Numbers] = {}

    def continue_after(self, trained: Numbers, order: Order) -> None:
        """Continue an epoch that began with other samples than its order; the untrained ones follow.

        Parameters
        ----------
        trained : array of int
            Numbers of the samples that were trained.
        """
        planned = epoch_order(self.samples, *order)
        self._instead[order] = np.empty_like(planned)
        self._instead[order][planned] = np.concatenate([trained, planned[~np.isin(planned, trained)]])

    def _next(self) -> Batch:
        chunk = self._running.at(self._position)
        if chunk.order in self._instead:
            chunk = replace(chunk, numbers=self._instead[chunk.order][chunk.numbers])
        return self._source.batch(chunk.numbers) if len(chunk.numbers) else self.sample, chunk


@dataclass(frozen=True)
class PreprocessorPool:
    """Preprocessors that fill rings, and the form of the rings.

    Parameters
    ----------
    folder : Path
        Folder for rings, in memory.
    num_workers : int or None
        Number of preprocessors that work; None: all.
    timeouts : Timeouts
        Time limits for batches and for the processes that share them.
    heartbeat : callable
        Function called every `check_s` seconds while a rank waits for a chunk.
    check_s : float
        Wait in seconds of a rank for a chunk before it checks the preparing processes.
    help_s : float
        Wait in seconds of a rank for a chunk before it prepares chunks itself, if no process does.
    """

    preprocessors: Preprocessors
    folder: Path
    num_workers: int | None = None
    timeouts: Timeouts = USUAL_TIMEOUTS
    heartbeat: Callable[[], None] = lambda: None
    check_s: float = CHECK_S
    help_s: float = HELP_S

    def share_rate(self) -> None:
        """Write down for the trainers of the node what one of a leader's preprocessors prepares."""
        if rate := self.preprocessors.timed.rate:
            write_private(self.folder / RATE_OF_LEADER, repr(rate), durable=False)

    @property
    def rate_of_leader(self) -> float | None:
        """Samples/s that one of the leader's preprocessors prepares; None: not known, or no leader."""
        with suppress(FileNotFoundError):
            return float((self.folder / RATE_OF_LEADER).read_text(encoding="ascii"))
        return None

    def ring(self, name: str, readers: int, stream: Stream, largest: int) -> Ring:
        """Open a ring for a stream; the first process creates it.

        Parameters
        ----------
        largest : int
            Samples of the largest batch that is read from it; it holds two of them.
        """
        slot_bytes = self.preprocessors.spec.slot_bytes(max(1, stream.split[stream.rank]))
        slots = max(1 - 2 * (-largest // stream.chunk), slots_of(stream.chunk, slot_bytes))
        shape = RingShape(slots, slot_bytes, readers)
        return Ring.create(self.folder / name, shape, self.timeouts.lockstep_s)

    def own_ring(self, stream: Stream) -> Ring:
        """Return a ring with a stream that no other process reads.

        Its file is removed once all its processes have opened it: a file in /dev/shm outlives killed
        processes, but the memory of an unlinked file goes with the last of them (unlink(2)).
        """
        name = f"{uuid.uuid4().hex}.ring"
        ring = self.ring(name, 1, stream, stream.chunk)
        try:
            ring.register_reader(0)
            self.fill(name, stream)
        finally:
            (self.folder / name).unlink(missing_ok=True)
        return ring

    def fill(self, name: str, stream: Stream) -> None:
        """Make the preprocessors fill a ring with a stream."""
        self.preprocessors.prepare(self.folder / name, stream, self.num_workers, self.timeouts.samples_s)

    def wait_for(
        self, ring: Ring, position: int, samples: int, is_served: Callable[[], bool] = lambda: False
    ) -> Samples:
        """Wait for a chunk; return its samples in place.

        Only preparation has a time limit: a full ring waits for its slowest reader, and a late reader waits
        until the others reach the next epoch.

        Parameters
        ----------
        is_served : callable
            Function called every `check_s` seconds while no chunk arrives. True: a process with its own
            time limit fills the ring.

        Raises
        ------
        HetctlError
            If one of this rank's preprocessors has failed, or no chunk is prepared in time.
        """
        patience_s = self.timeouts.samples_s
        limit, newest = time.monotonic() + patience_s, ring.newest
        while True:
            # A killed preprocessor must show here, not after the whole time limit.
            self.preprocessors.check()
            with suppress(RingTimeoutError):
                return self.preprocessors.spec.slot_views(ring.read(position, self.check_s), samples)
            self.heartbeat()
            if is_served() or ring.newest != newest or not ring.is_in_preparation():
                limit, newest = time.monotonic() + patience_s, ring.newest
            if time.monotonic() >= limit:
                raise HetctlError(f"no batch was prepared in {patience_s:g} s", FILE_SYSTEM)


class RingLoader(StreamLoader):
    """Views of batches in a ring that only this rank's preprocessors fill, and only this rank reads.

    The preprocessors run ahead of the trainer. When sizes change, each rank keeps what is prepared, and
    itself prepares the few samples that move to it. A change of more than `MAX_MOVED_SHARE` begins a new ring
    with the new sizes.
    """

    def __init__(self, stream: Stream, pool: PreprocessorPool) -> None:
        super().__init__(pool.preprocessors.sample, stream)
        self._pool = pool
        self._ring: Ring | None = None

    def split(self, sizes: tuple[int, ...]) -> None:
        """Use these sizes from the next chunk on; the ring keeps its first sizes."""
        self._stream = replace(self._stream, sizes=sizes)

    @property
    def preparation_rate(self) -> float | None:
        """Samples/s that one of this rank's preprocessors prepares."""
        return self._pool.preprocessors.timed.rate

    def close(self) -> None:
        """Leave the ring, which frees the preprocessors for another one."""
        if self._ring is not None:
            self._ring.unregister_reader()
            self._ring.close()
            self._ring = None

    def _begin(self, order: Order, start: int) -> None:
        self.close()
        super()._begin(order, start)
        self._ring = self._pool.own_ring(self._running)

    def _next(self) -> Batch:
        planned = self._running.at(self._position)
        # If many samples move between ranks, prepared ones are of little use.
        if moved(self._running.split, self._stream.split) > MAX_MOVED_SHARE * self._stream.chunk:
            self._begin(planned.order, planned.start)
            planned = self._running.at(0)
        assert self._ring is not None
        samples = self._pool.wait_for(self._ring, self._position, len(planned.numbers))
        return self._reassigned(samples, planned)

    def _release(self, _chunk: Chunk) -> None:
        assert self._ring is not None
        self._ring.release(self._position)

    def _reassigned(self, samples: Samples, planned: Chunk) -> Batch:
        """Return this rank's part of a chunk that may have been prepared with other sizes."""
        before, now = self._running.split, self._stream.split
        if now == before:
            return samples, planned
        kept, others = reassigned(planned.stop - planned.start, before, now, self._stream.rank)
        whole = epoch_order(self.samples, *planned.order)[planned.start : planned.stop]
        x, y = (rows[: kept.stop - kept.start] for rows in samples)
        numbers = whole[kept]
        if others:
            more = whole[list(others)]
            more_x, more_y = self._pool.preprocessors.make(more, planned.order)
            x, y = np.concatenate([x, more_x]), np.concatenate([y, more_y])
            numbers = np.concatenate([numbers, more])
        return (x, y), replace(planned, numbers=numbers)


class LockstepLoader(StreamLoader):
    """Batches from one ring that all ranks on a node read: the same samples in the same order for all.

    They are views of the ring, or copies if a batch has parts of several chunks.

    The slowest reader limits the others, by the capacity of the ring. A leader fills the ring with chunks of
    all nodes, or the preprocessors of some of these ranks fill it; if they end, those of all ranks take over.
    An interrupted member first finishes its epoch alone, and joins the others at the next one.
    """

    def __init__(self, stream: Stream, pool: PreprocessorPool, lockstep: Lockstep) -> None:
        super().__init__(pool.preprocessors.sample, stream)
        # A rank without working preprocessors needs one if no other process prepares for it.
        self._help_pool = replace(pool, num_workers=1) if pool.num_workers == 0 else pool
        self._alone = RingLoader(stream, self._help_pool)
        self._shared = Stream(stream.samples, lockstep.chunk, lockstep.seed)
        self._pool = pool
        self._lockstep = lockstep
        self._ring: Ring | None = None
        self._held: dict[int, Samples] = {}
        self._passed = 0
        self._has_leaders = False
        self._filling = False

    def batches(self, epoch: int, start: int, order: Order | None = None) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch; an interrupted one is finished alone."""
        return self._alone.batches(epoch, start, order) if start else super().batches(epoch, start)

    def split(self, sizes: tuple[int, ...]) -> None:
        """Use these sizes from the next chunk on."""
        super().split(sizes)
        self._alone.split(sizes)

    @property
    def preparation_rate(self) -> float | None:
        """Samples/s that one preprocessor prepares, of this rank or else of the leader."""
        return self._alone.preparation_rate or self._pool.rate_of_leader

    def close(self) -> None:
        """Leave the ring, so that no process waits for this rank."""
        self._alone.close()
        if self._ring is not None:
            self._ring.unregister_reader()
            if self._ring.deserted:
                # The folder stays for the next rounds of the job, and the ring would occupy its memory.
                self._path.unlink(missing_ok=True)
            self._ring.close()
            self._ring = None

    @property
    def _path(self) -> Path:
        return self._pool.folder / self._lockstep.name

    def _order_at(self, _epoch: int, _start: int) -> Order:
        """Join the ring; return the order of its next epoch, since a late reader arrives amid one."""
        if self._ring is None:
            self._join()
        first = next(at for at in count(self._passed) if not self._shared.at(at).start)
        self._pass(first)
        return self._shared.at(first).order

    def _join(self) -> None:
        self._alone.close()
        self._ring = self._pool.ring(
            self._lockstep.name, self._lockstep.readers, self._shared, self._lockstep.largest
        )
        self._passed = self._ring.register_reader(self._lockstep.reader)
        patience_s = self._pool.timeouts.lockstep_s
        self._has_leaders = self._lockstep.has_leaders and await_exchange(self._path, patience_s)
        if not self._has_leaders:
            self._fill_by(self._pool)

    def _fill_by(self, pool: PreprocessorPool) -> None:
        pool.fill(self._lockstep.name, self._shared)
        self._filling = pool.num_workers != 0

    def _replace_lost_producers(self, ring: Ring, waiting_since: float) -> bool:
        """Start this rank's preprocessors if the processes that filled the ring have ended or stopped.

        Return true if a leader fills it.
        """
        if self._has_leaders and not leader_fills(self._path):
            self._has_leaders = False
            self._fill_by(self._pool)
        needs_help = time.perf_counter() - waiting_since > self._pool.help_s
        if not (self._has_leaders or self._filling) and needs_help and ring.is_neglected():
            self._fill_by(self._help_pool)
        return self._has_leaders

    def _next(self) -> Batch:
        chunk = self._running.at(self._position)
        share = self._running.share(chunk.start, chunk.stop)
        size, first, last = self._shared.chunk, share.start, share.stop - 1
        parts = []
        for index in range(first // size, last // size + 1) if len(chunk.numbers) else ():
            x, y = self._taken(self._base(chunk) + index)
            inside = slice(max(first - index * size, 0), last + 1 - index * size)
            parts.append((x[inside], y[inside]))
        if len(parts) > 1:
            return (np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])), chunk
        return parts[0] if parts else self.sample, chunk

    def _base(self, chunk: Chunk) -> int:
        """Return the position in the ring of the first chunk of an epoch."""
        return (chunk.order[1] - 1) * -(-self.samples // self._shared.chunk)

    def _taken(self, position: int) -> Samples:
        """Return a chunk of the ring, which is held until all of it is trained."""
        assert self._ring is not None
        if position not in self._held:
            is_served = partial(self._replace_lost_producers, self._ring, time.perf_counter())
            samples = len(self._shared.at(position).numbers)
            self._held[position] = self._pool.wait_for(self._ring, position, samples, is_served)
        return self._held[position]

    def _release(self, chunk: Chunk) -> None:
        size = self._shared.chunk
        trained = -(-chunk.stop // size) if chunk.stop == self.samples else chunk.stop // size
        self._pass(self._base(chunk) + trained)

    def _pass(self, position: int) -> None:
        """Give up all chunks of the ring before a position."""
        assert self._ring is not None
        self._passed = position
        for passed in [held for held in self._held if held < position]:
            del self._held[passed]
            self._ring.release(passed)


def slots_of(chunk: int, slot_bytes: int) -> int:
    """Return the number of chunks prepared ahead: `PREFETCH_SAMPLES` samples, in `RING_BYTES` of memory."""
    return max(LEAST_SLOTS, min(-(-PREFETCH_SAMPLES // chunk), RING_BYTES // slot_bytes))
