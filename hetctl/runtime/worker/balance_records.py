"""Records of a group's balancing: events for the user, and a log from which it can be replayed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hetctl.methods.balance.observation_log import LoggedIteration, ManagerStart, line_of
from hetctl.model.serialization import encode
from hetctl.model.training_progress import RankShare
from hetctl.runtime.job_logs import log_line
from hetctl.runtime.worker.member_trainer import Reporter
from hetctl.storage.atomic_io import make_private_folder

LINES_EVERY_S = 1.0
"""Seconds between two writes to the log."""
LONGEST_LINE = 2**20
WHOLE_BYTES = 2**26
"""Size of a log from which on iterations are left out."""
SIZES_EVERY_S = 10.0
"""Least seconds between two events about sizes: some managers change them in each step."""


def interval(size_bytes: int, whole_bytes: int = WHOLE_BYTES) -> int:
    """Return of how many iterations one is written into a log of this size.

    All are at first; then one of 16, and half as many with every further eighth of the first size. So ten
    million iterations with lines of 1 KB take 120 MB, and the log never becomes much larger.
    """
    beyond = (size_bytes - whole_bytes) * 8 // whole_bytes
    return 1 if beyond < 0 else 16 << min(beyond, 10)


class BalanceRecorder:
    """Record of a group's balancing, on rank 0, as events and in a log.

    Parameters
    ----------
    log : Path
        File for the replay.
    whole_bytes : int
        Its size from which on iterations are left out.
    """

    def __init__(self, events: Reporter, log: Path, whole_bytes: int = WHOLE_BYTES) -> None:
        self._events = events
        self._log = log
        self._whole_bytes = whole_bytes
        self._size_bytes = log.stat().st_size if log.exists() else 0
        self._left_out = 0
        self._lines: list[str] = []
        self._is_whole = False
        self._next_lines = 0.0
        self._next_sizes = 0.0

    def started(self, reason: str, ranks: Sequence[RankShare]) -> None:
        """Write a ``balance_started`` event."""
        self._events.write("balance_started", reason=reason, ranks=encode(tuple(ranks)))

    def log(self, record: ManagerStart | LoggedIteration) -> None:
        """Add a record, if the log is not too long; the file gets it within about `LINES_EVERY_S`."""
        if isinstance(record, ManagerStart):
            self._add(record)
        elif (every := interval(self._size_bytes, self._whole_bytes)) > self._left_out + 1:
            self._left_out += 1
        else:
            # Without the iterations that were left out nothing is repeated, so weights are of no use.
            adopted = record.adopted if every == 1 else ""
            self._add(replace(record, left_out=self._left_out, adopted=adopted))
        if time.monotonic() >= self._next_lines:
            self.flush()

    def _add(self, record: ManagerStart | LoggedIteration) -> None:
        self._left_out = 0
        self._lines.append(line_of(record))
        self._size_bytes += len(self._lines[-1])

    def flush(self) -> None:
        """Append the records since the last call; training goes on if the disk is full."""
        self._next_lines = time.monotonic() + LINES_EVERY_S
        lines, self._lines = self._lines, []
        try:
            make_private_folder(self._log.parent)
            with self._log.open("ab") as file:
                if not self._is_whole:
                    file.truncate(_whole_lines(self._log))
                    self._is_whole = True
                file.write("".join(lines).encode())
        except OSError as error:
            log_line(f"{len(lines)} records of {self._log.name} are lost: {error}")

    def changed(self, ranks: Sequence[RankShare]) -> None:
        """Write a ``batch_sizes`` event, if the last one is `SIZES_EVERY_S` old."""
        if time.monotonic() >= self._next_sizes:
            self._next_sizes = time.monotonic() + SIZES_EVERY_S
            self._events.write("batch_sizes", ranks=encode(tuple(ranks)))

    def straggler(self, rank: RankShare, message: str) -> None:
        """Write a ``straggler`` event."""
        self._events.write("straggler", rank=encode(rank), message=message)


def _whole_lines(path: Path) -> int:
    """Return the bytes of the whole lines of a file: a killed process may have torn the last one."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LONGEST_LINE))
        tail = file.read()
    return size - (len(tail) - tail.rfind(b"\n") - 1)
