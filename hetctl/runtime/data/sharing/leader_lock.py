"""Lock that shows whether a ring is filled by the leader of the node, with chunks from other nodes."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

from hetctl.runtime.data.sharing.ofd_locks import ByteLocks

POLL_S = 0.05


def announce(ring: Path) -> ByteLocks:
    """Announce that this process fills a ring, until the result is closed or the process dies.

    The file gets its name only after it is locked: if it is not locked, the service is over.
    """
    path = _file(ring)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    locks = ByteLocks(temporary)
    locks.take(0)
    temporary.replace(path)
    return locks


def exchange_serves(ring: Path) -> bool:
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
    return exchange_serves(ring)


def _file(ring: Path) -> Path:
    return ring.with_name(f"{ring.name}.leader")
