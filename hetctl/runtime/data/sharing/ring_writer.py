"""Where a leader puts the chunks of all nodes: into the ring of its node, as long as anybody reads that."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from hetctl.runtime.data.sharing.leader_lock import announce
from hetctl.runtime.data.sharing.ring import Bytes, Ring, RingTimeoutError

IN_FLIGHT = 10
"""Chunks that are on their way at a time, FLEET's third queue."""
RETRY_S = 0.005
"""How often a leader looks whether a full ring has room again."""


class Outlet:
    """Where the chunks go on this node: into its ring while that has readers, then where nobody reads.

    This must be the ring's only producer. If there is another, trainers have given the leader up, and it
    leaves the ring to them.

    Parameters
    ----------
    path : Path
        Of the ring, which is announced to be filled for as long as it is.
    """

    def __init__(self, path: Path) -> None:
        self._ring = Ring(path)
        self._service = announce(path)
        self._read = True
        self._held: set[int] = set()
        self._spare = np.empty((IN_FLIGHT, self._ring.shape.slot_bytes), np.uint8)
        self._retry_at = 0.0

    @property
    def left(self) -> bool:
        """Whether the ring is no longer ours to fill."""
        return self._service.closed

    def buffer(self, position: int) -> Bytes | None:
        """Return room for the next position, None if there is none yet; of `IN_FLIGHT`, no two share it."""
        if self._read and position not in self._held and time.monotonic() >= self._retry_at:
            self._claim(position)
        if position in self._held:
            return self._ring.buffer(position)
        return None if self._read else self._spare[position % IN_FLIGHT]

    def publish(self, position: int, used_bytes: int) -> None:
        """Let readers have a position, if it has any."""
        if position in self._held:
            self._ring.publish(position, used_bytes)
            self._held.remove(position)
        self._leave_if_done()

    def _claim(self, position: int) -> None:
        try:
            claimed = self._ring.claim(0.0)
        except RingTimeoutError:
            self._retry_at = time.monotonic() + RETRY_S
            self._read = not self._ring.deserted
        else:
            self._read = claimed == position
            self._held |= {position} if self._read else set()
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        """Leave the ring, but not before what is on its way there has come: others may fill it then."""
        if not self._read and not self._held:
            self._ring.close()
            self._service.close()
