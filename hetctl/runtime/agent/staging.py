"""Stage-in beside an agent's main loop, which must go on sending heartbeats meanwhile."""

from __future__ import annotations

import os
import threading

from hetctl.runtime.agent.messages import StagedParts, StageOrder
from hetctl.runtime.data.stage_in import StagingStoppedError, stage, unstage

END_S = 2.0
"""Seconds in which a read or a write in progress ends."""


class Staging:
    """Thread that copies a node's parts.

    Attributes
    ----------
    bytes_read : int
        Bytes copied so far, for signs of life.
    """

    def __init__(self, node: str, order: StageOrder) -> None:
        self.bytes_read = 0
        self._order = order
        self._result = StagedParts()
        self._stopped = threading.Event()
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(node,), name="stage-in", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `result` would not block."""
        return self._woken

    def result(self) -> StagedParts:
        """Wait for the end of the copying; return what was copied."""
        self._thread.join()
        return self._result

    def end(self) -> None:
        """Stop the copying, and remove what was copied."""
        self._stopped.set()
        # A read from a file system that does not answer cannot be stopped; the thread ends with the process.
        self._thread.join(END_S)
        unstage(self._order)

    def _run(self, node: str) -> None:
        try:
            self._result = stage(node, self._order, self._count)
        except StagingStoppedError:
            pass
        finally:
            os.write(self._wake, b".")

    def _count(self, size_bytes: int) -> None:
        if self._stopped.is_set():
            raise StagingStoppedError
        self.bytes_read += size_bytes
