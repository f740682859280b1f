"""Chunks between nodes (FLEET, section 5): each node prepares its share, and its leader broadcasts it.

A leader never blocks: it starts the operations that can start, tests which have completed, and sleeps. A
blocking broadcast would keep a core busy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetctl.model.errors import HetctlError
from hetctl.runtime.data.preprocessors import BatchLayout
from hetctl.runtime.data.sampler import Chunk, Stream
from hetctl.runtime.data.sharing.ring import Bytes, Ring, RingTimeoutError
from hetctl.runtime.data.sharing.ring_writer import IN_FLIGHT, RingWriter

# Measured: Ibcast with Test and a sleep of 0.5 ms feeds 3,010 to 3,160 images/s per group, a blocking
# Bcast, which spins on a core, 2,200.
PAUSE_S, IDLE_S = 0.0005, 0.005
"""Sleep of a leader in seconds, while broadcasts are in flight and while none is."""
CHECK_EVERY_S = 1.0


@dataclass(frozen=True)
class NodeStream(Stream):
    """Chunks of a stream that one node prepares: every `nodes`-th, from number `node` on."""

    node: int = 0
    nodes: int = 1

    def at(self, position: int) -> Chunk:
        """Return the chunk at a position of the node's own chunks."""
        return super().at(position * self.nodes + self.node)


@dataclass(frozen=True)
class _Flight:
    position: int
    size: int
    request: Any


class Exchange:
    """One leader's part in the broadcasts.

    All leaders post all positions in the same order, as MPI demands, so a leader with a full ring stalls the
    others once their rings are full. A leader whose trainers have all left continues for the others.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Communicator of the leaders; leader i prepares the chunks of `NodeStream` i.
    outbox : Ring
        Ring with that stream's chunks; this is its only reader.
    watch : callable
        Function called every `CHECK_EVERY_S` seconds; it raises the error of processes that fill the outbox.
    stall_s : float
        Seconds without any progress after which an exchange fails; trainers, whose limit is longer, then
        continue by themselves.
    """

    def __init__(
        self,
        comm: Any,
        outbox: Ring,
        writer: RingWriter,
        stream: Stream,
        layout: BatchLayout,
        watch: Callable[[], None],
        stall_s: float,
    ) -> None:
        # Collectives of one communicator must come in one order on all ranks (MPI 3.1, 5.12), but leaders
        # reach the barrier at different positions: it has a communicator of its own.
        self._data, self._votes = comm.Dup(), comm.Dup()
        self._rank, self._ranks = int(comm.Get_rank()), int(comm.Get_size())
        self._outbox, self._ring_writer, self._watch = outbox, writer, watch
        self._stall_s = stall_s
        self._stream, self._layout = stream, layout
        self._in_flight: deque[_Flight] = deque()
        self._position = 0
        self._size = self._next_size()
        self._end_barrier: Any = None
        self._moved_at = self._watched_at = time.monotonic()

    def run(self) -> int:
        """Serve until no node has readers any more; return the number of broadcast chunks.

        Raises
        ------
        HetctlError
            If there is no progress for `stall_s`, or `watch` raises it. The other leaders must be ended then.
        """
        while not self._all_have_left():
            moved = [self._publish_arrived(), self._post()]
            if not any(moved):
                self._pause()
        self._drain()
        return self._position

    def _all_have_left(self) -> bool:
        """Enter a barrier once this node's readers have left; return true when all leaders have entered."""
        if self._end_barrier is None and self._ring_writer.left:
            self._end_barrier = self._votes.Ibarrier()
        return self._end_barrier is not None and bool(self._end_barrier.Test())

    def _publish_arrived(self) -> bool:
        """Publish the chunks that have arrived, in order."""
        before = len(self._in_flight)
        # Test() also drives the transfer: without calls into MPI, most implementations make no progress.
        while self._in_flight and self._in_flight[0].request.Test():
            flight = self._in_flight.popleft()
            self._ring_writer.publish(flight.position, flight.size)
            self._moved_at = time.monotonic()
        return len(self._in_flight) < before

    def _post(self) -> bool:
        """Post the next position if there is space for it and, if it is this node's, it is prepared."""
        own = self._position % self._ranks == self._rank
        if len(self._in_flight) == IN_FLIGHT or (own and self._prepared() is None):
            return False
        buffer = self._ring_writer.buffer(self._position)
        if buffer is None:
            if not self._in_flight:
                self._moved_at = time.monotonic()  # This node's readers may be slow, which is no error.
            return False
        if own:
            buffer[: self._size] = self._prepared()
            self._outbox.release(self._position // self._ranks)
        self._send(buffer)
        return True

    def _prepared(self) -> Bytes | None:
        try:
            return self._outbox.take(self._position // self._ranks, 0.0)
        except RingTimeoutError:
            return None

    def _send(self, buffer: Bytes) -> None:
        request = self._data.Ibcast(buffer[: self._size], root=self._position % self._ranks)
        self._in_flight.append(_Flight(self._position, self._size, request))
        self._position += 1
        self._size = self._next_size()
        self._moved_at = time.monotonic()

    def _next_size(self) -> int:
        return self._layout.bytes_of(len(self._stream.at(self._position).numbers))

    def _drain(self) -> None:
        """Post the positions that others have posted already, with any content: no process reads them."""
        furthest = self._furthest()
        while self._in_flight or self._position < furthest:
            moved = self._publish_arrived()
            if self._position < furthest and len(self._in_flight) < IN_FLIGHT:
                buffer = self._ring_writer.buffer(self._position)
                assert buffer is not None
                self._send(buffer)
            elif not moved:
                self._pause()
        self._await(self._votes.Ibarrier())

    def _furthest(self) -> int:
        positions = np.zeros(self._ranks, np.int64)
        self._await(self._votes.Iallgather(np.array([self._position]), positions))
        return int(positions.max())

    def _await(self, request: Any) -> None:
        while not request.Test():
            self._pause()

    def _pause(self) -> None:
        now = time.monotonic()
        if now > self._moved_at + self._stall_s:
            leader = f"leader {self._rank} of {self._ranks}"
            raise HetctlError(
                f"{leader} made no progress at chunk {self._position} for {self._stall_s:g} s",
                "check trainers and leaders on the other nodes, and the file system of the data",
            )
        if now > self._watched_at + CHECK_EVERY_S:
            self._watch()
            self._watched_at = now
        time.sleep(PAUSE_S if self._in_flight else IDLE_S)
