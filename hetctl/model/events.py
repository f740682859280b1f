"""Events of a run: the reports of its driver and trainers, and the reasons for which tasks end."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from hetctl.model.values import dataclass


class ExitReason(enum.Enum):
    """Reason for which a task ended.

    FINISHED: the member has converged. STOPPED: it left with a checkpoint, because the driver or SIGTERM
    requested it, because no further epoch fitted, or because it was forced to leave. TIME, PREEMPTED,
    CANCELLED: the batch system ended it with its job. NOT_LAUNCHED: the batch system did not answer the
    launcher, or started agents on other nodes. DISK_ERROR: the file system did not answer for minutes. HUNG:
    no rank sent a heartbeat. GPU_BUSY: its GPU lets in one process at a time, and there is another.
    BAD_INPUT: its code or its entry of the ensemble file has an error that each further try would meet.
    """

    FINISHED = "finished"
    STOPPED = "told"
    TIME = "time"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    NOT_LAUNCHED = "not-launched"
    NODE_FAILURE = "node-failure"
    OUT_OF_MEMORY = "out-of-memory"
    GPU_BUSY = "gpu-busy"
    DISK_FULL = "disk-full"
    DISK_ERROR = "disk-error"
    HUNG = "hung"
    KILLED = "killed"
    BAD_INPUT = "bad-input"
    PROGRAM_ERROR = "program-error"


CLEAN_EXITS = frozenset({ExitReason.FINISHED, ExitReason.STOPPED})
"""Reasons for which the trainer exits regularly: by itself, or at the driver's request."""

MEMBER_FAULTS = frozenset(
    {
        *(ExitReason.PROGRAM_ERROR, ExitReason.KILLED, ExitReason.HUNG),
        *(ExitReason.OUT_OF_MEMORY, ExitReason.GPU_BUSY, ExitReason.BAD_INPUT),
    }
)
"""Failures that count against the member; of others, only those beyond the free ones below."""

FREE_NODE_FAILURES = 3
"""Node failures of a member in one run that do not count against it."""

FREE_DISK_ERRORS = 3
"""Disk errors of a member without progress between them that do not count against it."""

JOB_FATAL = frozenset({ExitReason.TIME, ExitReason.PREEMPTED, ExitReason.CANCELLED, ExitReason.DISK_FULL})
"""Reasons that would end every other task of the job, too."""

# 65, 69, 71, 73 and 74 are EX_DATAERR, EX_UNAVAILABLE, EX_OSERR, EX_CANTCREAT and EX_IOERR of sysexits.h; 75
# below is EX_TEMPFAIL.
EXIT_CODES = {
    ExitReason.PROGRAM_ERROR: 1,
    ExitReason.BAD_INPUT: 65,
    ExitReason.GPU_BUSY: 69,
    ExitReason.OUT_OF_MEMORY: 71,
    ExitReason.DISK_ERROR: 73,
    ExitReason.DISK_FULL: 74,
}
"""Exit codes of ranks by reason."""

LOST_PEER = 75
"""Exit code of a rank that failed only because another rank of its group had ended."""


class Request(enum.Enum):
    """Request of a user about one member of a run; CHANGE without a member is about the run."""

    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    RETRY = "retry"
    ADD = "add"
    DROP = "drop"
    CHANGE = "change"


DRIVER = "driver"
REQUESTS = "_requests"
"""Source of users' requests; no member can have this name."""


Order = tuple[float, str, int]
"""Sort key of an event among all events of a run: time in seconds, source, line number."""


@dataclass(frozen=True)
class Event:
    """One line of an event file.

    Parameters
    ----------
    source : str
        Name of the file without its suffix: a member, ``driver`` or ``_requests``.
    seq : int
        Line number from 0; (source, seq) identifies the event permanently.
    kind : str
        ``task_started``, ``epoch``, ``converged``, ..: see docs/files.md.
    time : float
        Seconds since the epoch, on the writer's clock.
    round : int
        Index of the round that it belongs to, or in which the job starts; 0 if there are no rounds.
    """

    source: str
    seq: int
    kind: str
    time: float
    data: Mapping[str, Any]
    round: int = 0

    @cached_property
    def record(self) -> Any:
        """Its fields as the type that `FORMS` has for its kind; ValueError if it is corrupt."""
        # Processes that only write events start sooner without these classes.
        from hetctl.model.event_records import record_of

        return record_of(self.kind, self.data)

    @property
    def order(self) -> Order:
        """Sort key: time; for equal times source and line number."""
        # Times of different nodes may be equal; source and line then decide.
        return self.time, self.source, self.seq


def in_order(events: Iterable[Event]) -> list[Event]:
    """Sort events by time."""
    return sorted(events, key=lambda event: event.order)
