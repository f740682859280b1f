"""Writes a member's pulse every few seconds, in a thread that training does not wait for."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hetctl.core.codec import encode
from hetctl.core.pulse import Pulse

EVERY_S = 2.0

Busy = Callable[[], float | None]
"""Says which share of its device a process has used since it was last asked; None if nobody knows."""


@contextlib.contextmanager
def beating(path: Path, samples: int, busy: Busy) -> Iterator[Callable[[int, int, Any], None]]:
    """Yield what is to be told of each step: the epoch, its samples that are done, and the loss.

    Parameters
    ----------
    path : Path
        `RoundFolder.pulse_of` the member; at the end the last word is taken back.
    samples : int
        Of an epoch.
    """
    heart = _Heart(path, samples, busy)
    over = threading.Event()
    thread = threading.Thread(target=heart.beat, args=(over,), name="heart", daemon=True)
    thread.start()
    try:
        yield heart.note
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


class _Heart:
    def __init__(self, path: Path, samples: int, busy: Busy) -> None:
        self._path = path
        self._samples = samples
        self._busy = busy
        self._seen: tuple[int, int, Any] | None = None

    def note(self, epoch: int, position: int, loss: Any) -> None:
        self._seen = (epoch, position, loss)

    def beat(self, over: threading.Event) -> None:
        last_at, last = time.time(), (0, 0)
        while not over.wait(EVERY_S):
            if self._seen is None:
                continue
            (epoch, position, loss), now = self._seen, time.time()
            if last[0]:
                done = (epoch - last[0]) * self._samples + position - last[1]
                rate = max(0.0, done / (now - last_at))
                self._write(Pulse(now, epoch, position, self._samples, rate, _number(loss), self._busy()))
            last_at, last = now, (epoch, position)

    def _write(self, pulse: Pulse) -> None:
        """Replace the last word; a disk that is full is no matter here."""
        temporary = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            temporary.touch(0o600)
            temporary.write_text(json.dumps(encode(pulse)), encoding="utf-8")
            temporary.replace(self._path)


def cores_used() -> Busy:
    """Return what says which share of its cores this process has used since it was last asked."""
    last = [time.monotonic(), time.process_time()]

    def share() -> float:
        wall, cpu = time.monotonic(), time.process_time()
        used = (cpu - last[1]) / max(wall - last[0], 1e-9) / len(os.sched_getaffinity(0))
        last[:] = [wall, cpu]
        return min(1.0, used)

    return share


def gpu_used() -> Busy:
    """Return what says which share of the last moments the GPU of this process was in use."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--id={gpu}"]

    def share() -> float | None:
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
            return float(answer) / 100
        except (OSError, subprocess.SubprocessError, ValueError):
            return None

    return share


def _number(loss: Any) -> float | None:
    if loss is None:
        return None
    try:
        value = float(loss)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
