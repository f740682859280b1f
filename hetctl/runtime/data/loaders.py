"""Sources of a rank's batches: arrays in its memory, or rings that preprocessors fill."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from hetctl.model.errors import HetctlError
from hetctl.model.site import USUAL_TIMEOUTS, Timeouts
from hetctl.runtime.data.lineup import Lockstep
from hetctl.runtime.data.preprocessors import FILE_SYSTEM, BatchLayout, Preprocessors
from hetctl.runtime.data.sampler import Chunk, Numbers, Order, Stream, epoch_order, moved, reassigned
from hetctl.runtime.data.sharing.ring import Bytes, Ring, RingTimeoutError, Shape
from hetctl.runtime.data.sharing.ring_writer import await_exchange, exchange_serves
from hetctl.runtime.data.sources import Array, ArraySource

Samples = tuple[Array, Array]
Batch = tuple[Samples, Chunk]

AHEAD = 2048
"""Samples that are prepared ahead, as in FLEET's queues (section 5)."""
RING_BYTES = 2**28
LEAST_SLOTS = 3
MOST_MOVED = 0.1
"""Share of a chunk that ranks prepare themselves, for one another, before their preprocessors begin anew."""


@dataclass(frozen=True)
class LoaderWaits:
    """Times in seconds for which a rank waits for a chunk before it looks after the preparation.

    Parameters
    ----------
    check_s : float
        Time between two checks of the preparing processes.
    help_s : float
        Time after which it starts to prepare chunks itself if no process does.
    """

    check_s: float = 1.0
    help_s: float = 5.0


USUAL_LOADER_WAITS = LoaderWaits()


class Loader:
    """A rank's share of the batches of all epochs; of a rank that reads no samples, none.

    Parameters
    ----------
    samples : int
        Samples of an epoch, for the whole group.
    sample : tuple of arrays
        A batch with one sample, as an example; also the batch of a rank without a share, since each rank has
        to take part in the averaging.
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
        """Split the chunks that are requested from now on by these sizes, as in `Stream`.

        All ranks of the group must split the same chunk by the same sizes.
        """

    def close(self) -> None:
        """Release the batches; no more are requested."""


class ArrayLoader(Loader):
    """Batches from two arrays; they need no preparation."""

    def __init__(self, source: ArraySource, stream: Stream) -> None:
        super().__init__(len(source), (source.x[[0]], source.y[[0]]))
        self._x, self._y = source.x, source.y
        self._stream = stream
        self._instead: dict[Order, Numbers] = {}

    def continue_after(self, trained: Numbers, order: Order) -> None:
        """Continue an epoch whose first samples were not those of its order: the others make up the rest.

        Parameters
        ----------
        trained : array of int
            Numbers of the samples that were trained.
        """
        planned = epoch_order(self.samples, *order)
        self._instead[order] = np.empty_like(planned)
        self._instead[order][planned] = np.concatenate([trained, planned[~np.isin(planned, trained)]])

    def batches(self, epoch: int, start: int, order: Order | None = None) -> Generator[Batch, None, None]:
        """Yield copies of the samples."""
        order = order or (self._stream.seed, epoch)
        while start < self.samples:
            # The sizes may have changed since the last chunk.
            chunk = self._stream.beginning_at(order, start).at(0)
            if order in self._instead:
                chunk = replace(chunk, numbers=self._instead[order][chunk.numbers])
            chosen = chunk.numbers
            yield (self._x[chosen], self._y[chosen]) if len(chosen) else self.sample, chunk
            start = chunk.stop

    def split(self, sizes: tuple[int, ...]) -> None:
        """Use these sizes from the next chunk on."""
        self._stream = replace(self._stream, sizes=sizes)


@dataclass(frozen=True)
class PreprocessorPool:
    """Preprocessors that fill rings, and the form of the rings.

    Parameters
    ----------
    num_workers : int or None
        Number of preprocessors that work; None: all.
    timeouts : Timeouts
        Time limits for batches and for the processes that share them.
    folder : Path
        Folder for rings, in memory.
    sample : tuple of arrays
        A batch with one sample.
    waits : LoaderWaits
        Waits of the ranks that take chunks from the rings.
    heartbeat : callable
        Function called every `waits.check_s` seconds while a rank waits for a chunk.
    """

    layout: BatchLayout
    preprocessors: Preprocessors
    folder: Path
    sample: Samples
    num_workers: int | None = None
    timeouts: Timeouts = USUAL_TIMEOUTS
    waits: LoaderWaits = USUAL_LOADER_WAITS
    heartbeat: Callable[[], None] = lambda: None

    def ring(self, name: str, readers: int, stream: Stream, largest: int) -> Ring:
        """Open a ring for a stream; the first process creates it.

        Parameters
        ----------
        largest : int
            Samples of the largest batch that is read from it: it must hold two of those.
        """
        slot_bytes = self.layout.bytes_of(max(1, stream.split[stream.rank]))
        slots = max(1 - 2 * (-largest // stream.chunk), slots_of(stream.chunk, slot_bytes))
        shape = Shape(slots, slot_bytes, readers)
        return Ring.create(self.folder / name, shape, self.timeouts.lockstep_s)

    def own_ring(self, stream: Stream) -> Ring:
        """Return a ring with a stream that no other process reads.

        Its file is removed as soon as all its processes have opened it: files in /dev/shm outlive killed
        processes; without a name, their memory goes with the last one (unlink(2)).
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

    def take(
        self, ring: Ring, position: int, samples: int, is_served: Callable[[], bool] = lambda: False
    ) -> Samples:
        """Wait for a chunk; return its samples in place.

        Only the preparation of a chunk has a time limit. A ring that is full waits for its slowest reader,
        and a reader that has joined late for the others to reach the next epoch.

        Parameters
        ----------
        is_served : callable
            Function called every `waits.check_s` seconds while no chunk arrives, which returns true if a
            process that limits the preparation itself fills the ring.

        Raises
        ------
        HetctlError
            If one of this rank's preprocessors has failed, or no chunk is prepared in time.
        """
        patience_s = self.timeouts.samples_s
        limit, newest = time.monotonic() + patience_s, ring.newest
        while True:
            # A preprocessor that was killed publishes nothing: it must show
            # here, not after the whole time limit.
            self.preprocessors.check()
            with suppress(RingTimeoutError):
                return self.layout.views(_whole(ring.take(position, self.waits.check_s)), samples)
            self.heartbeat()
            if is_served() or ring.newest != newest or not ring.is_in_preparation():
                limit, newest = time.monotonic() + patience_s, ring.newest
            if time.monotonic() >= limit:
                raise HetctlError(f"no batch was prepared in {patience_s:g} s", FILE_SYSTEM)


class RingLoader(Loader):
    """Batches that this rank's own preprocessors put into a ring that no other process reads.

    The preprocessors are ahead of the trainer. When sizes change, the ranks keep what each has prepared, and
    prepare the few samples themselves that move between them. A change of more than `MOST_MOVED` begins a new
    ring with the new sizes.
    """

    def __init__(self, stream: Stream, pool: PreprocessorPool) -> None:
        super().__init__(stream.samples, pool.sample)
        self._own = stream
        self._stream = stream
        self._pool = pool
        self._ring: Ring | None = None
        self._position = 0

    def batches(self, epoch: int, start: int, order: Order | None = None) -> Generator[Batch, None, None]:
        """Yield views of the ring, or copies if there are samples from other ranks."""
        order = order or (self._own.seed, epoch)
        while start < self.samples:
            ring = self._ring_at(order, start)
            planned = self._stream.at(self._position)
            samples = self._pool.take(ring, self._position, len(planned.numbers))
            samples, chunk = self._reassigned(samples, planned)
            yield samples if len(chunk.numbers) else self.sample, chunk
            ring.release(self._position)
            self._position += 1
            start = chunk.stop

    def split(self, sizes: tuple[int, ...]) -> None:
        """Use these sizes from the next chunk on."""
        self._own = replace(self._own, sizes=sizes)

    def close(self) -> None:
        """Leave the ring, which frees the preprocessors for another one."""
        if self._ring is not None:
            self._ring.unregister_reader()
            self._ring.close()
            self._ring = None

    def _reassigned(self, samples: Samples, planned: Chunk) -> Batch:
        """Return this rank's part of a chunk that may have been prepared with other sizes."""
        if self._own.split == self._stream.split:
            return samples, planned
        count = planned.stop - planned.start
        kept, others = reassigned(count, self._stream.split, self._own.split, self._own.rank)
        whole = epoch_order(self.samples, *planned.order)[planned.start : planned.stop]
        (x, y), first = samples, kept.stop - kept.start
        numbers = whole[kept]
        if others:
            taken = whole[list(others)]
            more_x, more_y = self._pool.preprocessors.make(taken, planned.order)
            x, y = np.concatenate([x[:first], more_x]), np.concatenate([y[:first], more_y])
            numbers = np.concatenate([numbers, taken])
        return (x[: len(numbers)], y[: len(numbers)]), replace(planned, numbers=numbers)

    def _ring_at(self, order: Order, start: int) -> Ring:
        """Return the ring, filled from that position of the order on."""
        upcoming = self._stream.at(self._position)
        # Preprocessors are ahead of the trainer, beyond the epoch's end:
        # what they have is of use if it is next.
        is_next = (upcoming.order, upcoming.start) == (order, start)
        if self._ring is None or not is_next or self._is_far_from_plan():
            self.close()
            self._stream, self._position = self._own.beginning_at(order, start), 0
            self._ring = self._pool.own_ring(self._stream)
        return self._ring

    def _is_far_from_plan(self) -> bool:
        """Return true if so many samples move between ranks that prepared ones are of little use."""
        return moved(self._stream.split, self._own.split) > MOST_MOVED * self._own.chunk


class LockstepLoader(Loader):
    """Batches from one ring that all ranks on a node read: the same samples in the same order for all.

    The slowest reader limits the others, by the capacity of the ring. The ring is filled by a leader, which
    supplies chunks from other nodes, or by the preprocessors of some of these ranks; if those have ended, by
    the preprocessors of all. A member that was interrupted in an epoch first trains the rest of it by itself,
    and joins the others from the next epoch on.
    """

    def __init__(self, stream: Stream, pool: PreprocessorPool, lockstep: Lockstep) -> None:
        super().__init__(stream.samples, pool.sample)
        # A rank without preprocessors at work needs one where no other process prepares for it.
        self._help_pool = replace(pool, num_workers=1) if pool.num_workers == 0 else pool
        self._own_loader = RingLoader(stream, self._help_pool)
        self._shared = Stream(stream.samples, lockstep.chunk, lockstep.seed)
        self._member = stream
        self._pool = pool
        self._lockstep = lockstep
        self._ring: Ring | None = None
        self._position = 0
        self._has_leaders = False
        self._filling = False

    def batches(self, epoch: int, start: int, order: Order | None = None) -> Generator[Batch, None, None]:
        """Yield views of the ring, or copies if a batch has parts of several chunks."""
        if start:
            yield from self._own_loader.batches(epoch, start, order)
            return
        ring = self._joined_ring()
        # A reader that joins late is somewhere in an epoch: it begins with the next one.
        while self._shared.at(self._position).start:
            self._position += 1
        yield from self._batches_from(ring, self._position)
        self._position += -(-self.samples // self._shared.chunk)

    def split(self, sizes: tuple[int, ...]) -> None:
        """Use these sizes from the next chunk on."""
        self._member = replace(self._member, sizes=sizes)
        self._own_loader.split(sizes)

    def close(self) -> None:
        """Leave the ring: no other process waits for this rank any more."""
        self._own_loader.close()
        if self._ring is not None:
            self._ring.unregister_reader()
            if self._ring.deserted:
                # The folder stays for the next rounds of the job, and the ring would occupy its memory.
                (self._pool.folder / self._lockstep.name).unlink(missing_ok=True)
            self._ring.close()
            self._ring = None

    def _joined_ring(self) -> Ring:
        if self._ring is None:
            self._own_loader.close()
            name, readers = self._lockstep.name, self._lockstep.readers
            self._ring = self._pool.ring(name, readers, self._shared, self._lockstep.largest)
            self._position = self._ring.register_reader(self._lockstep.reader)
            patience_s = self._pool.timeouts.lockstep_s
            self._has_leaders = self._lockstep.has_leaders and await_exchange(
                self._pool.folder / name, patience_s
            )
            if not self._has_leaders:
                self._fill_by(self._pool)
        return self._ring

    def _fill_by(self, pool: PreprocessorPool) -> None:
        pool.fill(self._lockstep.name, self._shared)
        self._filling = pool.num_workers != 0

    def _replace_lost_producers(self, ring: Ring, waiting_since: float) -> bool:
        """Start this rank's preprocessors if the processes that filled the ring have ended or stopped.

        Return true if a leader fills it.
        """
        if self._has_leaders and not exchange_serves(self._pool.folder / self._lockstep.name):
            self._has_leaders = False
            self._fill_by(self._pool)
        needs_help = time.perf_counter() - waiting_since > self._pool.waits.help_s
        if not (self._has_leaders or self._filling) and needs_help and ring.is_neglected():
            self._fill_by(self._help_pool)
        return self._has_leaders

    def _batches_from(self, ring: Ring, base: int) -> Generator[Batch, None, None]:
        """Yield the batches of the epoch that begins at position `base` of the shared stream."""
        order = self._shared.at(base).order
        numbers = epoch_order(self.samples, *order)
        held: dict[int, Samples] = {}
        for start in range(0, self.samples, self._member.chunk):
            stop = min(start + self._member.chunk, self.samples)
            share = self._member.share(start, stop)
            yield self._part(ring, base, held, share), Chunk(order, start, stop, numbers[share])
            for index in [
                index for index in held if (index + 1) * self._shared.chunk <= stop or stop == self.samples
            ]:
                del held[index]
                ring.release(base + index)

    def _part(self, ring: Ring, base: int, held: dict[int, Samples], share: slice) -> Samples:
        """Return the samples of an epoch at the positions `share`; `held` are the chunks taken so far."""
        if share.start == share.stop:
            return self.sample
        size, first, last = self._shared.chunk, share.start, share.stop - 1
        parts = []
        for index in range(first // size, last // size + 1):
            if index not in held:
                held[index] = self._take(ring, base + index)
            x, y = held[index]
            inside = slice(max(first - index * size, 0), last + 1 - index * size)
            parts.append((x[inside], y[inside]))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])

    def _take(self, ring: Ring, position: int) -> Samples:
        began = time.perf_counter()
        count = len(self._shared.at(position).numbers)
        return self._pool.take(ring, position, count, partial(self._replace_lost_producers, ring, began))


def slots_of(chunk: int, slot_bytes: int) -> int:
    """Return the number of chunks prepared ahead: `AHEAD` samples, in `RING_BYTES` of memory."""
    return max(LEAST_SLOTS, min(-(-AHEAD // chunk), RING_BYTES // slot_bytes))


def _whole(slot: Bytes | None) -> Bytes:
    """Return a slot that was taken: it exists, since these streams have no end."""
    assert slot is not None
    return slot
