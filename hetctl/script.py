"""Functions for a script that hetctl trains as a member: `report`, `should_stop`, `last_checkpoint`.

They need nothing but the standard library, and outside of a run they do nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import stat
import sys
import time
from pathlib import Path
from typing import SupportsFloat

from hetctl.model.training_settings import ANSWER_VARIABLE, PROGRESS_VARIABLE, RESUME_VARIABLE, STOP_VARIABLE

REPORT_INTERVAL_S = 0.25
"""Seconds between two reports within an epoch; those in between are dropped."""
ANSWER_TIMEOUT_S = 5.0
"""Seconds to wait for an answer: the node may be busy, or another process may have read the answer."""


def report(
    *,
    epoch: int | None = None,
    samples: int | None = None,
    seconds: float | None = None,
    finished: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    predictions: str | os.PathLike[str] | None = None,
    **metrics: SupportsFloat,
) -> None:
    """Report a finished epoch, progress within it, or a checkpoint alone.

    Report an epoch after its checkpoint was written. Reports of ranks other than 0 are ignored.

    Parameters
    ----------
    epoch : int or None
        Number of the epoch, from 1; a restart does not reset it. None: there is only a checkpoint.
    samples : int or None
        Samples that all ranks have trained in the epoch so far. None: no rate is derived.
    seconds : float or None
        Seconds that their training took; None: the time since the last finished epoch.
    finished : bool
        False for progress within the epoch. It may be reported after each step: only four reports a second
        are sent, and the metrics of the others are not converted.
    checkpoint : path or None
        File or folder of a complete checkpoint, from which the next start may continue.
    predictions : path or None
        File by ``numpy.savez`` for `hetctl ensemble`: ``outputs`` and ``targets`` of all validation samples
        after a finished epoch, a row each, in an order that all members share. Copies of the best are kept.
    **metrics
        Metrics of the epoch, including the one of the stop rule. Within an epoch only ``loss`` counts, and
        the one by which a search may end its trials there.

    Raises
    ------
    TypeError
        If there is neither an epoch nor a checkpoint.
    """
    if epoch is None and checkpoint is None:
        raise TypeError("report() needs an epoch or a checkpoint")
    if (descriptor := _descriptor(PROGRESS_VARIABLE)) is None:
        return
    if not (finished or checkpoint is not None or _SENT.takes_part(time.monotonic())):
        return
    files = {"checkpoint": checkpoint, "predictions": predictions}
    paths = {key: None if path is None else str(Path(path).absolute()) for key, path in files.items()}
    said = {"epoch": epoch, "samples": samples, "seconds": seconds, **paths}
    line = {key: value for key, value in said.items() if value is not None}
    if not finished:
        line["finished"] = False
    text = json.dumps(line | {name: _number(value) for name, value in metrics.items()})
    _SENT.count(judged=finished)
    # A rank that has ended reads no more, and ends this script.
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{text}\n".encode())


def _number(value: SupportsFloat) -> float:
    # PyTorch warns of a loss that still has its gradient.
    detach = getattr(value, "detach", None)
    return float(detach() if detach else value)


def should_stop() -> bool:
    """Return true once the script has to write a checkpoint and exit; it is started again later.

    After the report of a finished epoch it waits until hetctl has applied the stop rule.
    """
    if (descriptor := _descriptor(STOP_VARIABLE)) is None:
        return False
    if (answers := _descriptor(ANSWER_VARIABLE)) is not None:
        _SENT.await_answer(answers)
    return _readable(descriptor, 0.0)


def last_checkpoint() -> Path | None:
    """Return the newest existing checkpoint that an earlier start has reported, or None."""
    path = os.environ.get(RESUME_VARIABLE)
    return Path(path) if path else None


class _Sent:
    """Lines that this process has reported, and the answers to them."""

    def __init__(self) -> None:
        self._lines = 0
        self._answered = 0
        self._awaited = 0
        self._next_part = 0.0

    def takes_part(self, now: float) -> bool:
        """Return true if the last report within an epoch is long enough ago."""
        if now < self._next_part:
            return False
        self._next_part = now + REPORT_INTERVAL_S
        return True

    def count(self, *, judged: bool) -> None:
        """Count a line; if it is `judged`, its answer is awaited."""
        self._lines += 1
        if judged:
            self._awaited = self._lines

    def await_answer(self, descriptor: int) -> None:
        """Wait until all lines up to the last awaited one are answered."""
        limit = time.monotonic() + ANSWER_TIMEOUT_S
        while self._answered < self._awaited:
            if not _readable(descriptor, limit - time.monotonic()) or not (answers := _read(descriptor)):
                self._answered = self._awaited
            else:
                self._answered += len(answers)


_SENT = _Sent()


def _readable(descriptor: int, wait_s: float) -> bool:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(max(0.0, 1000 * wait_s)))


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 2**12)
    except OSError:
        return b""


def _descriptor(variable: str) -> int | None:
    """Return the descriptor in a variable; None if there is none, or if a launcher has closed it."""
    value = os.environ.get(variable, "")
    if not value.isdigit():
        return None
    # The script may have opened a file under this number, which a report would overwrite.
    if _is_pipe(int(value)):
        return int(value)
    _warn_of_closed_pipes(variable)
    return None


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


@functools.cache
def _warn_of_closed_pipes(variable: str) -> None:
    print(
        f"hetctl: {variable} is closed in this process, by a program between hetctl and the script such as "
        "torchrun: reports are lost, and stops go unseen. hetctl starts the ranks itself: give the script as "
        "`command`, without a launcher",
        file=sys.stderr,
        flush=True,
    )
