"""Chunks between nodes (FLEET, section 5): each node prepares its share, and its leader broadcasts that.

A leader waits for nobody: it starts what can be started, asks what has arrived, and sleeps. A broadcast
that blocks would keep a core busy.
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
from hetctl.runtime.data.sharing.ring_writer import IN_FLIGHT, Outlet

PAUSE_S, IDLE_S = 0.0005, 0.005
"""How long a leader sleeps while something is on its way, and while nothing is."""
LOOK_S = 1.0


@dataclass(frozen=True)
class NodeStream(Stream):
    """Of a stream's chunks those that one node prepares: every `nodes`-th, from number `node` on."""

    node: int = 0
    nodes: int = 1

    def at(self, position: int) -> Chunk:
        """Return the chunk at a position among the node's own."""
        return super().at(position * self.nodes + self.node)


@dataclass(frozen=True)
class _Flight:
    position: int
    size: int
    request: Any


class Exchange:
    """One leader's part in the broadcasts.

    All leaders post all positions in the same order, as MPI demands, so one whose ring is full holds the
    others back by what their rings hold. Whose trainers have all left goes on for the others' sake.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Of the leaders; leader i prepares what `NodeStream` i has.
    outbox : Ring
        That stream's chunks; this is its only reader.
    watch : callable
        Raises what has become of those that fill the outbox; called every `LOOK_S`.
    stall_s : float
        Without any progress for so long an exchange fails; trainers, who are more patient, go on by
        themselves.
    """

    def __init__(
        self,
        comm: Any,
        outbox: Ring,
        outlet: Outlet,
        stream: Stream,
        layout: BatchLayout,
        watch: Callable[[], None],
        stall_s: float,
    ) -> None:
        self._data, self._votes = comm.Dup(), comm.Dup()
        self._rank, self._ranks = int(comm.Get_rank()), int(comm.Get_size())
        self._outbox, self._outlet, self._watch = outbox, outlet, watch
        self._stall_s = stall_s
        self._stream, self._layout = stream, layout
        self._flying: deque[_Flight] = deque()
        self._position = 0
        self._size = self._next_size()
        self._farewell: Any = None
        self._moved_at = self._watched_at = time.monotonic()

    def run(self) -> int:
        """Serve until no node has readers any more; return how many chunks went through.

        Raises
        ------
        HetctlError
            If nothing has moved for `stall_s`, or `watch` says so. The others have to be ended then.
        """
        while not self._all_have_left():
            moved = [self._land(), self._post()]
            if not any(moved):
                self._rest()
        self._drain()
        return self._position

    def _all_have_left(self) -> bool:
        """Enter a barrier when our readers have left; it completes when everybody's have."""
        if self._farewell is None and self._outlet.left:
            self._farewell = self._votes.Ibarrier()
        return self._farewell is not None and bool(self._farewell.Test())

    def _land(self) -> bool:
        """Publish what has arrived, in order."""
        before = len(self._flying)
        while self._flying and self._flying[0].request.Test():
            flight = self._flying.popleft()
            self._outlet.publish(flight.position, flight.size)
            self._moved_at = time.monotonic()
        return len(self._flying) < before

    def _post(self) -> bool:
        """Post the next position if there is room for it and, if it is ours, it has been prepared."""
        own = self._position % self._ranks == self._rank
        if len(self._flying) == IN_FLIGHT or (own and self._prepared() is None):
            return False
        buffer = self._outlet.buffer(self._position)
        if buffer is None:
            if not self._flying:
                self._moved_at = time.monotonic()  # our own readers may take their time
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
        self._flying.append(_Flight(self._position, self._size, request))
        self._position += 1
        self._size = self._next_size()
        self._moved_at = time.monotonic()

    def _next_size(self) -> int:
        return self._layout.bytes_of(len(self._stream.at(self._position).numbers))

    def _drain(self) -> None:
        """Post what others have posted already, whatever is in it: nobody reads it any more."""
        furthest = self._furthest()
        while self._flying or self._position < furthest:
            moved = self._land()
            if self._position < furthest and len(self._flying) < IN_FLIGHT:
                buffer = self._outlet.buffer(self._position)
                assert buffer is not None
                self._send(buffer)
            elif not moved:
                self._rest()
        self._await(self._votes.Ibarrier())

    def _furthest(self) -> int:
        positions = np.zeros(self._ranks, np.int64)
        self._await(self._votes.Iallgather(np.array([self._position]), positions))
        return int(positions.max())

    def _await(self, request: Any) -> None:
        while not request.Test():
            self._rest()

    def _rest(self) -> None:
        now = time.monotonic()
        if now > self._moved_at + self._stall_s:
            who = f"leader {self._rank} of {self._ranks}"
            raise HetctlError(
                f"{who} is stuck at chunk {self._position}, for {self._stall_s:g} s",
                "look what trainers and leaders on the other nodes do, and for the file system of the data",
            )
        if now > self._watched_at + LOOK_S:
            self._watch()
            self._watched_at = now
        time.sleep(PAUSE_S if self._flying else IDLE_S)
