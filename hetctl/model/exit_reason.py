"""Why a member's step ends, and what follows for the member."""

from __future__ import annotations

import enum


class Why(enum.Enum):
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


IN_ORDER = frozenset({Why.FINISHED, Why.TOLD})
"""The trainer left of its own accord, or since the driver wanted it to."""

FAULTS = frozenset({Why.PROGRAM_ERROR, Why.KILLED, Why.HUNG, Why.OUT_OF_MEMORY})
"""Held against the member; all others are free, node failures up to `FREE_NODE_FAILURES`."""

FREE_NODE_FAILURES = 3
"""Of a member in a run: one that takes more nodes down than that is at fault itself."""

ENDS_THE_JOB = frozenset({Why.TIME, Why.PREEMPTED, Why.CANCELLED, Why.DISK_FULL})
"""What ended one step would end every other one, too."""

EXIT_CODES = {Why.PROGRAM_ERROR: 1, Why.OUT_OF_MEMORY: 71, Why.DISK_FULL: 74}
"""What ranks exit with."""

LOST_PEER = 75
"""What a rank exits with that failed only since another one of its group was gone."""
