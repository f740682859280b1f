"""Files in the node's memory that CUDA and PyTorch leave of ranks that end without exit handlers."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def remove_shared_files(pid: int, folder: Path = SHARED_MEMORY) -> None:
    """Remove what a process has shared with other processes; those that have it open keep it.

    PyTorch counts there who has opened tensors of the process (80 kB), and CUDA keeps handles of events.
    """
    for pattern in (f"torch_{pid}_*", f"cuda.shm.{os.getuid():x}.{pid:x}.*"):
        for path in folder.glob(pattern):
            with suppress(OSError):
                path.unlink()
