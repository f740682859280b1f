"""Reports of ranks: events of rank 0, and the cause of a failure."""

from __future__ import annotations

import contextlib
import sys
import traceback
from dataclasses import replace

from hetctl.model.errors import DISK_FULL_ERRORS, SERVER_ERRORS, BadInputError, HetctlError
from hetctl.model.events import EXIT_CODES, ExitReason
from hetctl.model.training_settings import FRAMEWORKS
from hetctl.runtime.worker.hardware import peak_memory
from hetctl.runtime.worker.messages import TaskMessage
from hetctl.storage.event_files import EventWriter, read_events
from hetctl.storage.patience import Patience

OUT_OF_MEMORY_ERRORS = frozenset(
    {"MemoryError", *(name for entry in FRAMEWORKS.values() for name in entry.out_of_memory)}
)
"""Classes of errors of Python, NumPy and frameworks; by name, since only one framework is ever loaded."""
FULL_MEMORY = tuple(message for entry in FRAMEWORKS.values() for message in entry.full_memory)
BUSY_GPU = (
    "CUDA-capable devices are busy or unavailable",
    "CUDA-capable device(s) is/are busy or unavailable",
)
"""Parts of messages of CUDA, before and since version 11, which all frameworks pass on, where another process
has a GPU in the compute mode EXCLUSIVE_PROCESS."""


def has_saved(task: TaskMessage, patience: Patience) -> bool:
    """Return true if the events of a task's member report a checkpoint."""
    events = patience.call(lambda: list(read_events(task.events / f"{task.name}.jsonl")))
    return any(event.kind == "checkpoint" for event in events)


def report_failure(error: Exception, events: EventWriter) -> int:
    """Write a ``failed`` event; return the exit code of the failure, one of `EXIT_CODES`."""
    reason = failure_reason(error)
    # If a full disk is the reason, the log has no room either.
    with contextlib.suppress(OSError):
        # Our own errors are due to the user's input: their message says all.
        if isinstance(error, HetctlError):
            print(_summary(error), file=sys.stderr)
        else:
            traceback.print_exception(error)
    if reason is ExitReason.DISK_ERROR:
        # The rank has already waited for the disk.
        events.patience = replace(events.patience, limit_s=0.0)
    with contextlib.suppress(OSError):
        events.write("failed", error=_summary(error), reason=reason.value, peak_memory_bytes=peak_memory())
    return EXIT_CODES[reason]


def failure_reason(error: BaseException) -> ExitReason:
    """Return the reason of a failure: full memory, a GPU, the disk, the user's input, or the program."""
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
        return ExitReason.DISK_FULL
    if isinstance(error, OSError) and error.errno in SERVER_ERRORS:
        return ExitReason.DISK_ERROR
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & OUT_OF_MEMORY_ERRORS or any(message in str(error) for message in FULL_MEMORY):
        return ExitReason.OUT_OF_MEMORY
    if any(message in str(error) for message in BUSY_GPU):
        return ExitReason.GPU_BUSY
    reason = ExitReason.PROGRAM_ERROR if error.__cause__ is None else failure_reason(error.__cause__)
    # Errors of its subclasses may pass.
    is_final = type(error) is BadInputError and reason is ExitReason.PROGRAM_ERROR
    return ExitReason.BAD_INPUT if is_final else reason


def _summary(error: Exception) -> str:
    if isinstance(error, HetctlError):
        return " ".join(filter(None, (error.message, f"({error.hint})" if error.hint else "")))
    return f"{type(error).__name__}: {error}".splitlines()[0][:500]
