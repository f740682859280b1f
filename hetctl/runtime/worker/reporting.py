"""What ranks report: events of rank 0, and why one failed."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any

from hetctl.model.errors import HetctlError
from hetctl.model.exit_reason import EXIT_CODES, ExitReason
from hetctl.runtime.best_effort_io import DISK_FULL_ERRORS
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.hardware import peak_memory
from hetctl.runtime.worker.messages import TaskMessage
from hetctl.storage.event_files import EventWriter

OUT_OF_MEMORY_ERRORS = frozenset({"MemoryError", "ResourceExhaustedError", "OutOfMemoryError"})
"""Python's and NumPy's, TensorFlow's, PyTorch's: by name, since only one framework is ever loaded."""

FULL_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""What PyTorch says of the node's memory, for which it has no class."""


class _Silent:
    """Where the events of other ranks go."""

    def write(self, kind: str, **data: Any) -> None:
        """Ranks other than 0 report nothing."""


def writer_of(task: TaskMessage, send_written: Callable[[int], None]) -> EventWriter:
    """Return what writes the events of a task.

    Parameters
    ----------
    send_written : callable
        Takes the length of the file after each event, in bytes; a connection that is gone is no matter here.
    """

    def tell(length: int) -> None:
        with contextlib.suppress(ConnectionError):
            send_written(length)

    return EventWriter(task.events, task.name, task.round, tell)


def reporter(task: TaskMessage, group: Group, send_written: Callable[[int], None]) -> Any:
    """Return rank 0's event writer, as of `writer_of`, and a silent one for the others."""
    return writer_of(task, send_written) if group.rank == 0 else _Silent()


def report_failure(error: Exception, events: EventWriter) -> int:
    """Write a ``failed`` event; return which of the `EXIT_CODES` to leave with."""
    traceback.print_exception(error)
    why = why_failed(error)
    with contextlib.suppress(OSError):
        events.write("failed", error=_summary(error), why=why.value, peak_memory_bytes=peak_memory())
    return EXIT_CODES[why]


def why_failed(error: BaseException) -> ExitReason:
    """Tell a full memory or disk from an error of the program."""
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
        return ExitReason.DISK_FULL
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & OUT_OF_MEMORY_ERRORS or FULL_MEMORY in str(error):
        return ExitReason.OUT_OF_MEMORY
    return ExitReason.PROGRAM_ERROR if error.__cause__ is None else why_failed(error.__cause__)


def _summary(error: Exception) -> str:
    if isinstance(error, HetctlError):
        return " ".join(filter(None, (error.message, f"({error.hint})" if error.hint else "")))
    return f"{type(error).__name__}: {error}".splitlines()[0][:500]
