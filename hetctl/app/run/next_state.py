"""Next state of a run after the end of its jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hetctl.app.run.recovery import IDLE_JOBS, idle_jobs, progressed_at, reasons_of_jobs
from hetctl.model.events import Event
from hetctl.model.exit_reason import ExitReason
from hetctl.model.job import Job
from hetctl.model.run import RunSpec
from hetctl.scheduling.budget import exceeded, exceeded_by_jobs
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import events_in, progress_of
from hetctl.storage.usage_fold import usage_of

QUEUED, RUNNING, FINISHED, FAILED = "queued", "running", "finished", "failed"
CANCELLED, STOPPED = "cancelled", "stopped"
ALL_CONVERGED = "every member has converged"


def next_state(spec: RunSpec, folder: RunFolder, jobs: Sequence[Job], taken_up: bool) -> tuple[str, str]:
    """Return the state of a run after its jobs, and the reason; ``queued`` requests another job.

    Parameters
    ----------
    taken_up : bool
        True if the user has just continued the run: trouble of earlier jobs does not count then.
    """
    events = events_in(folder)
    progress = progress_of(spec.ensemble, events, spec.retries)
    if not any(member.active for member in progress.values()):
        failed = [name for name, member in progress.items() if member.failed]
        return (FAILED, f"{len(failed)} members failed") if failed else (FINISHED, ALL_CONVERGED)
    used = exceeded(spec.budget, usage_of(events, time.time()))
    trouble = "" if taken_up else _trouble(folder, jobs, events)
    reason = exceeded_by_jobs(spec.budget, len(jobs)) or used or trouble
    return (STOPPED, reason) if reason else (QUEUED, "")


def _trouble(folder: RunFolder, jobs: Sequence[Job], events: Sequence[Event]) -> str:
    """Return why another job would fail as the last ones did; empty if it may succeed."""
    if reasons_of_jobs(events)[-1:] == [ExitReason.DISK_FULL.value]:
        return "the disk is full: free some space, then `hetctl submit` goes on"
    idle = idle_jobs([job for job in jobs if job.state.over], progressed_at(events))
    if len(idle) < IDLE_JOBS:
        return ""
    ends = ", ".join(job.state.value for job in idle)
    return f"the last {len(idle)} jobs got nothing done ({ends}): see their logs in {folder.path}"
