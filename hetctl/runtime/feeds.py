"""Where a rank's batches come from: arrays in its memory, or a ring that preprocessors fill."""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from hetctl.core.errors import HetctlError
from hetctl.runtime.preprocessors import Layout, Preprocessors
from hetctl.runtime.sharing.ring import Bytes, Ring, RingTimeoutError, Shape
from hetctl.runtime.sources import Array, ArraySource
from hetctl.runtime.stream import Chunk, Stream

Samples = tuple[Array, Array]

AHEAD = 2048
"""Samples that are prepared ahead, as in FLEET's queues (section 5)."""
RING_BYTES = 2**28
LEAST_SLOTS = 3
LOOK_S = 1.0
PATIENCE_S = 600.0
"""A chunk that takes longer to prepare than this never comes."""


class Feed(Protocol):
    """A rank's share of the batches of any epoch.

    Attributes
    ----------
    samples : int
        Of an epoch, for the whole group.
    sample : tuple of arrays
        A batch of one, to see what batches look like.
    """

    samples: int
    sample: Samples

    @property
    def waited_s(self) -> float:
        """Time for which the trainer has waited for batches."""

    def batches(self, epoch: int, start: int) -> Generator[tuple[Samples, Chunk], None, None]:
        """Yield the batches of an epoch behind its first `start` samples.

        What a batch holds may change as soon as the next one is asked for. A rank without a share gets
        one sample all the same, since it has to take part in the averaging.
        """


class ArrayFeed:
    """Batches out of two arrays; nothing has to be prepared, so nobody waits."""

    waited_s = 0.0

    def __init__(self, source: ArraySource, stream: Stream) -> None:
        self.samples = len(source)
        self.sample = source.x[[0]], source.y[[0]]
        self._x, self._y = source.x, source.y
        self._stream = stream

    def batches(self, epoch: int, start: int) -> Generator[tuple[Samples, Chunk], None, None]:
        """Yield copies."""
        for chunk in _chunks(self._stream.beginning_at(epoch, start)):
            chosen = chunk.numbers
            yield (self._x[chosen], self._y[chosen]) if len(chosen) else self.sample, chunk


class RingFeed:
    """Batches that this rank's own preprocessors put into a ring of shared memory.

    Parameters
    ----------
    folder : Path
        For the ring, in memory; the file is removed as soon as everybody has opened it.
    sample : tuple of arrays
        What a rank without a share gets.
    """

    def __init__(
        self, stream: Stream, layout: Layout, preprocessors: Preprocessors, folder: Path, sample: Samples
    ) -> None:
        self.samples = stream.samples
        self.sample = sample
        self.waited_s = 0.0
        self._stream = stream
        self._layout = layout
        self._preprocessors = preprocessors
        self._folder = folder
        self._ring: Ring | None = None
        self._position = 0

    def batches(self, epoch: int, start: int) -> Generator[tuple[Samples, Chunk], None, None]:
        """Yield views of the ring."""
        ring = self._ring_at(epoch, start)
        while (chunk := self._stream.at(self._position)).epoch == epoch:
            slot = self._take(ring, self._position)
            yield self._layout.views(slot, len(chunk.numbers)) if len(chunk.numbers) else self.sample, chunk
            ring.release(self._position)
            self._position += 1

    def _ring_at(self, epoch: int, start: int) -> Ring:
        """Return the ring, filled from there on."""
        upcoming = self._stream.at(self._position)
        if self._ring is None or (upcoming.epoch, upcoming.start) != (epoch, start):
            self._leave()
            self._stream = self._stream.beginning_at(epoch, start)
            self._position = 0
            self._ring = self._new_ring()
        return self._ring

    def _new_ring(self) -> Ring:
        path = self._folder / f"{uuid.uuid4().hex}.ring"
        slot_bytes = self._layout.bytes_of(-(-self._stream.chunk // self._stream.ranks))
        ring = Ring.create(path, Shape(slots_of(self._stream.chunk, slot_bytes), slot_bytes, 1), PATIENCE_S)
        try:
            ring.join(0)
            self._preprocessors.prepare(path, self._stream)
        finally:
            with suppress(FileNotFoundError):
                path.unlink()
        return ring

    def _take(self, ring: Ring, position: int) -> Bytes:
        began = time.perf_counter()
        try:
            return self._taken(ring, position, began + PATIENCE_S)
        finally:
            self.waited_s += time.perf_counter() - began

    def _taken(self, ring: Ring, position: int, limit: float) -> Bytes:
        while True:
            self._preprocessors.check()
            with suppress(RingTimeoutError):
                slot = ring.take(position, LOOK_S)
                assert slot is not None  # the stream has no end
                return slot
            if time.perf_counter() > limit:
                raise HetctlError(
                    f"no batch was prepared in {PATIENCE_S:g} s", "is the file system of the data alive?"
                )

    def _leave(self) -> None:
        if self._ring is not None:
            self._ring.leave()
            self._ring.close()
            self._ring = None


def slots_of(chunk: int, slot_bytes: int) -> int:
    """Return how many chunks are prepared ahead: `AHEAD` samples, in `RING_BYTES` of memory."""
    return max(LEAST_SLOTS, min(-(-AHEAD // chunk), RING_BYTES // slot_bytes))


def _chunks(stream: Stream) -> Iterator[Chunk]:
    """Yield the chunks of a stream's first epoch."""
    position = 0
    while (chunk := stream.at(position)).epoch == stream.epoch:
        yield chunk
        position += 1
