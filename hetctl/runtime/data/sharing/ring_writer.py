"""The leader's side of a node's ring: chunks of all nodes, and a lock that shows that they come."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import numpy as np

from hetctl.runtime.data.sharing.ofd_locks import ByteLocks
from hetctl.runtime.data.sharing.ring import Bytes, Ring, RingTimeoutError

IN_FLIGHT = 10
"""Chunks in flight at a time, FLEET's third queue."""
RETRY_S = 0.005
"""Seconds between two attempts to claim a slot of a full ring."""
POLL_S = 0.05
"""Seconds between two checks of a trainer for the announcement of a leader."""


class RingWriter:
    """Destination of chunks on this node: its ring while that has readers, then unused memory.

    This must be the ring's only producer. If there is another, trainers no longer rely on the leader, which
    then leaves the ring to them.

    Parameters
    ----------
    path : Path
        File of the ring; the leader announces itself as long as it fills the ring.
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
        """True once this leader has left the ring to others."""
        return self._service.closed

    def buffer(self, position: int) -> Bytes | None:
        """Return memory for a position, None if there is none yet; `IN_FLIGHT` positions never overlap."""
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
        self._close_if_done()

    def _claim(self, position: int) -> None:
        try:
            claimed = self._ring.claim(0.0)
        except RingTimeoutError:
            self._retry_at = time.monotonic() + RETRY_S
            # A claim of a full ring fails both while readers are slow and after the last one was killed.
            self._read = not self._ring.deserted
        else:
            self._read = claimed == position
            self._held |= {position} if self._read else set()
        self._close_if_done()

    def _close_if_done(self) -> None:
        """Close the ring after all positions in flight are published: others may fill it then."""
        if not self._read and not self._held:
            self._ring.close()
            self._service.close()


def announce(ring: Path) -> ByteLocks:
    """Announce that this process fills a ring, until the result is closed or the process dies.

    The file gets its name only after it is locked: if it is not locked, the service is over.
    """
    path = _file(ring)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    locks = ByteLocks(temporary)
    locks.acquire(0)
    temporary.replace(path)
    return locks


def leader_fills(ring: Path) -> bool:
    """Return true if a living leader fills the ring."""
    try:
        locks = ByteLocks(_file(ring))
    except FileNotFoundError:
        return False
    try:
        return locks.held_by_another(0)
    finally:
        locks.close()


def await_exchange(ring: Path, timeout_s: float) -> bool:
    """Wait for a leader that has not started; return true if one fills the ring."""
    limit = time.monotonic() + timeout_s
    while not _file(ring).exists() and time.monotonic() < limit:
        time.sleep(POLL_S)
    return leader_fills(ring)


def _file(ring: Path) -> Path:
    return ring.with_name(f"{ring.name}.leader")
