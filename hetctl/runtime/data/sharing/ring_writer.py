"""Destination of the chunks of all nodes at a leader: the ring of its node, while it has readers."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from hetctl.runtime.data.sharing.leader_lock import announce
from hetctl.runtime.data.sharing.ring import Bytes, Ring, RingTimeoutError

IN_FLIGHT = 10
"""Chunks in flight at a time, FLEET's third queue."""
RETRY_S = 0.005
"""Seconds between two attempts to claim a slot of a full ring."""


class Outlet:
    """Destination of chunks on this node: its ring while that has readers, then unused memory.

    This must be the ring's only producer. If there is another, trainers no longer rely on the leader, which
    then leaves the ring to them.

    Parameters
    ----------
    path : Path
        File of the ring; the leader announces that it fills the ring as long as it does.
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
        """True if this leader no longer fills the ring."""
        return self._service.closed

    def buffer(self, position: int) -> Bytes | None:
        """Return memory for the next position, None if there is none yet; `IN_FLIGHT` ones never overlap."""
        if self._read and position not in self._held and time.monotonic() >= self._retry_at:
            self._claim(position)
        if position in self._held:
            return self._ring.buffer(position)
        return None if self._read else self._spare[position % IN_FLIGHT]

    def publish(self, position: int, used_bytes: int) -> None:
        """Publish a position if it is in the ring."""
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
        """Leave the ring after all positions in flight are published: others may fill it then."""
        if not self._read and not self._held:
            self._ring.close()
            self._service.close()
