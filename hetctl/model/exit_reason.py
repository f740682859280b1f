"""Why a member's step ends, and what follows for the member."""

from __future__ import annotations

import enum


class ExitReason(enum.Enum):
    """Why a step ended.

    FINISHED: the member has converged. TOLD: it left with a checkpoint, since it was told to (by the
    driver, or by SIGTERM) or no epoch fitted any more, or was made to leave. TIME, PREEMPTED, CANCELLED: the
    batch system ended it with its job. NOT_LAUNCHED: the batch system did not answer the launcher, or started
    agents elsewhere. HUNG: no rank gave a sign of life.
    """

    FINISHED = "finished"
    TOLD = "told"
    TIME = "time"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    NOT_LAUNCHED = "not-launched"
    NODE_FAILURE = "node-failure"
    OUT_OF_MEMORY = "out-of-memory"
    DISK_FULL = "disk-full"
    HUNG = "hung"
    KILLED = "killed"
    PROGRAM_ERROR = "program-error"


CLEAN_EXITS = frozenset({ExitReason.FINISHED, ExitReason.TOLD})
"""The trainer left of its own accord, or since the driver wanted it to."""

MEMBER_FAULTS = frozenset(
    {ExitReason.PROGRAM_ERROR, ExitReason.KILLED, ExitReason.HUNG, ExitReason.OUT_OF_MEMORY}
)
"""Held against the member; all others are free, node failures up to `FREE_NODE_FAILURES`."""

FREE_NODE_FAILURES = 3
"""Of a member in a run: one that takes more nodes down than that is at fault itself."""

JOB_FATAL = frozenset({ExitReason.TIME, ExitReason.PREEMPTED, ExitReason.CANCELLED, ExitReason.DISK_FULL})
"""What ended one step would end every other one, too."""

EXIT_CODES = {ExitReason.PROGRAM_ERROR: 1, ExitReason.OUT_OF_MEMORY: 71, ExitReason.DISK_FULL: 74}
"""What ranks exit with."""

LOST_PEER = 75
"""What a rank exits with that failed only since another one of its group was gone."""
