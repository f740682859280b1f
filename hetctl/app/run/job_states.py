"""States of a run's jobs by the batch system and the run's files, and the effect of their ends on the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hetctl.cluster.batch.base import START_PATIENCE_S, BatchSystem
from hetctl.model.events import DRIVER, Event, ExitReason, in_order
from hetctl.model.job import SUPERSEDED_EXIT, Job, JobState, JobStatus, RunReason, moved
from hetctl.model.run import RunSpec, Usage
from hetctl.model.training_progress import CANCELLED, Progress
from hetctl.storage.event_files import read_events
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_files import read_claim
from hetctl.storage.run_state import OF_JOBS, RunState, state_in

if TYPE_CHECKING:
    from hetctl.catalog.catalog import Catalog


def refresh_jobs(
    catalog: Catalog, batch: BatchSystem, folder: RunFolder, ending: int | None = None
) -> tuple[Job, ...]:
    """Update the jobs of a run in the catalog, and return them; cancel those whose numbers others claimed.

    Parameters
    ----------
    ending : int or None
        Number of a job that is about to end, and counts as finished. It is not stored as finished: only
        the batch system will know why it ended.
    """
    known = catalog.jobs(folder.name)
    jobs = current_jobs(known, batch, job_events(folder), ending, claimant_in(folder))
    save_jobs(catalog, folder.name, jobs, ending)
    pairs = zip(known, jobs, strict=True)
    batch.cancel([old.batch_id for old, job in pairs if old.batch_id not in ("", job.batch_id)])
    return jobs


Claimant = Callable[[Job], str]
"""Function that returns the id of the batch job that has claimed a job's number; empty if none has yet."""


def claimant_in(folder: RunFolder) -> Claimant:
    """Return the claimants of a run's jobs, by their files."""
    return lambda job: read_claim(folder.job(job.number))


def save_jobs(catalog: Catalog, run: str, jobs: Sequence[Job], ending: int | None = None) -> None:
    """Store the jobs of a run, as returned by `current_jobs`."""
    for job in jobs:
        if job.number != ending:
            catalog.save_job(run, job)


def at_work(jobs: Sequence[Job], folder: RunFolder) -> list[Job]:
    """Return the jobs that may still train: they are not over, and their drivers have reported no end."""
    ended = ended_by_files(jobs, job_events(folder), done=False, silent=True)
    return [job for job in ended if not job.state.over]


def job_events(folder: RunFolder) -> list[Event]:
    """Read the drivers' events about the jobs of a run, in order of time."""
    return in_order(read_events(folder.events_of(DRIVER), OF_JOBS))


def current_jobs(
    jobs: Sequence[Job],
    batch: BatchSystem,
    events: Sequence[Event],
    ending: int | None = None,
    claimant: Claimant = lambda job: job.batch_id,
) -> tuple[Job, ...]:
    """Return the jobs with states by one query of the batch system, or by files for those that it forgot.

    If another batch job has claimed a job's number, the job has its id from now on.

    Parameters
    ----------
    events : sequence of Event
        Events as returned by `job_events`.
    """
    # One query for all jobs: batch systems limit or discourage frequent ones.
    alive = [job for job in jobs if job.batch_id and not job.state.over and job.number != ending]
    statuses = {**batch.statuses([job.batch_id for job in alive])}
    # Read after the query, so that a job that has ended because another has its number is seen as claimed.
    claims = {job.number: claimant(job) for job in alive}
    others = [claims[job.number] for job in alive if claims[job.number] not in ("", job.batch_id)]
    statuses |= batch.statuses(others) if others else {}
    # A claim that this machine does not see yet does not end the job.
    unseen = {job.batch_id for job in alive if not claims[job.number]}
    statuses |= {
        job: JobStatus(JobState.UNKNOWN, reason="another job has its number")
        for job in unseen
        if statuses[job].exit_code == SUPERSEDED_EXIT
    }
    claimed = (replace(job, batch_id=claims.get(job.number) or job.batch_id) for job in jobs)
    return tuple(_updated(job, statuses, events, ending) for job in claimed)


def _updated(job: Job, statuses: Mapping[str, JobStatus], events: Sequence[Event], ending: int | None) -> Job:
    if job.state.over or not job.batch_id:
        return job
    own = [event for event in events if event.record.job == job.number]
    status = JobStatus(JobState.FINISHED) if job.number == ending else statuses[job.batch_id]
    if status.state is JobState.UNKNOWN:
        status = replace(status, state=_state_by_files(job, own))
    return moved(
        job,
        status.state,
        ended_at=max((event.time for event in own), default=time.time()) if status.state.over else None,
        exit_code=status.exit_code,
        reason=status.reason,
        failed_nodes=_failed_nodes(status, own),
    )


def ended_by_files(
    jobs: Sequence[Job], events: Sequence[Event], *, done: bool, silent: bool
) -> tuple[Job, ...]:
    """Return the jobs; those that have ended by the run's own files are FINISHED.

    Parameters
    ----------
    events : sequence of Event
        All events of the run, in order of time.
    done : bool
        True if no member needs more training.
    silent : bool
        True if the batch system does not answer; the states are then the last known ones. Otherwise files
        decide only about jobs that it has forgotten.
    """
    return tuple(
        _ended_by_files(job, events, done) if silent or job.state is JobState.UNKNOWN else job for job in jobs
    )


def _ended_by_files(job: Job, events: Sequence[Event], done: bool) -> Job:
    """Finish a job whose driver has reported its end, or that has started and has no work left."""
    own = [event for event in events if event.data.get("job") == job.number]
    has_started = any(event.kind == "job_started" for event in own)
    end = _reported_end(own) or (events[-1] if done and has_started else None)
    if job.state.over or end is None:
        return job
    return moved(job, JobState.FINISHED, ended_at=end.time)


def _failed_nodes(status: JobStatus, events: Sequence[Event]) -> tuple[str, ...]:
    """Return the nodes that ended the job or one of its steps, except those used afterwards."""
    seen: dict[str, None] = {}
    for event in events:
        if event.kind == "node_failed":
            seen |= dict.fromkeys(event.record.nodes)
        elif event.kind == "node_joined":
            seen.pop(event.record.node, None)
    return tuple(dict.fromkeys([*status.failed_nodes, *seen]))


def _state_by_files(job: Job, events: Sequence[Event]) -> JobState:
    """Return the state, by the run's own files, of a job that the batch system has forgotten."""
    if _reported_end(events):
        return JobState.FINISHED
    started = max((event.time for event in events), default=None)
    patience = job.wall_s if started is not None else START_PATIENCE_S
    # A started job ends within its limit; any other has to appear soon after its submission.
    gone = time.time() > (started or job.submitted_at) + patience
    return JobState.VANISHED if gone else JobState.UNKNOWN


def _reported_end(events: Sequence[Event]) -> Event | None:
    """Return the report of a job's end; None without one, or if the job was requeued and has started again.

    Parameters
    ----------
    events : sequence of Event
        Events about the job, in order of time.
    """
    about_job = [event for event in events if event.kind in ("job_started", "job_ended")]
    return about_job[-1] if about_job and about_job[-1].kind == "job_ended" else None


ALL_CONVERGED = "every member has converged"

IDLE_JOBS = 2
"""Number of consecutive jobs without progress that was possible, after which a run stops."""
NODE_FAILURES = 3
"""Number of consecutive failures of nodes that do not count as jobs without progress."""

SHORTEST_JOB_S = 120
"""Least time in seconds of a job within a budget of node-hours, unless all jobs are shorter."""

CONTINUES = "`hetctl submit` continues the run"
CONTINUES_WITHIN_BUDGET = f"{CONTINUES}, within a new budget if one is given"

FREE = frozenset({JobState.PREEMPTED, JobState.CANCELLED})
"""Ends of jobs without a fault of the run; they predict nothing about the next job."""


def shortest_job_s(spec: RunSpec) -> int:
    """Return the least time in seconds for which a job of a run is submitted within node-hours."""
    return min(spec.wall_s, SHORTEST_JOB_S)


def reason_to_end(spec: RunSpec, folder: RunFolder, jobs: Sequence[Job]) -> tuple[RunReason, str] | None:
    """Return why a run ends after its jobs, with a text for the user; None if it needs another job."""
    state = state_in(folder, spec)
    if not state.has_work:
        return _outcome(state.progress, state.facts.search_ended)
    budget, used = spec.budget, used_until_now(state, jobs)
    if limit := budget.exceeded_by_jobs(len(jobs) - spec.earlier_jobs) or budget.exceeded(used):
        return RunReason.BUDGET, f"{limit}; {CONTINUES_WITHIN_BUDGET}"
    if len(jobs) > spec.earlier_jobs and not spec.may_chain:
        return RunReason.BUDGET, f"queue {spec.queue} permits no chain of jobs; {CONTINUES}"
    left_s = budget.wall_left_s(used_at_most(spec, state, jobs), spec.nodes)
    if left_s < shortest_job_s(spec):
        left = f"--node-hours {budget.node_hours:g} leave {max(left_s, 0):.0f} s for another job"
        return RunReason.BUDGET, f"{left}, which needs {shortest_job_s(spec)} s; {CONTINUES_WITHIN_BUDGET}"
    trouble = _trouble(folder, [job for job in jobs if job.number >= spec.earlier_jobs], state)
    return (RunReason.NO_PROGRESS, trouble) if trouble else None


def used_until_now(state: RunState, jobs: Iterable[Job]) -> Usage:
    """Return the resources used by a run; tasks whose driver was killed have ended with its last events."""
    last = state.facts.last
    goes_on = last is None or any(not job.state.over for job in jobs)
    return state.usage.used(time.time() if last is None or goes_on else last.time)


def used_at_most(spec: RunSpec, state: RunState, jobs: Sequence[Job]) -> Usage:
    """Return the resources that a run has used, and may use in jobs that are not over.

    Jobs from before it was last continued are about to end, and have had their own budget.
    """
    used = used_until_now(state, jobs)
    granted = (job for job in jobs if job.number >= spec.earlier_jobs)
    alive = sum(job.nodes * job.wall_s for job in granted if not job.state.over)
    return replace(used, node_seconds=used.node_seconds + alive)


def _outcome(progress: Mapping[str, Progress], search_ended: str | None) -> tuple[RunReason, str]:
    """Return how a run without work has ended; a search goes on without trials that fail."""
    trials = {name for name, member in progress.items() if member.asked}
    lost = {name for name in trials if progress[name].failed}
    withheld = [member.withheld for member in progress.values() if not (member.failed or member.converged)]
    if paused := sum(member.is_paused for member in progress.values()):
        return RunReason.PAUSED, f"{paused} of {len(progress)} members paused; `hetctl resume` trains them"
    failed = [name for name, member in progress.items() if member.failed and name not in trials]
    if failed or (trials and lost == trials):
        return RunReason.MEMBERS_FAILED, f"{len(failed) or len(lost)} of {len(progress)} members failed"
    cancelled = withheld.count(CANCELLED)
    converged = f"every member but {cancelled} cancelled ones has converged" if cancelled else ALL_CONVERGED
    return RunReason.CONVERGED, f"the search has ended: {search_ended}" if search_ended else converged


def _trouble(folder: RunFolder, jobs: Sequence[Job], state: RunState) -> str:
    """Return why another job would fail as these did; empty if it may succeed."""
    numbers = {job.number for job in jobs}
    reasons = reasons_of_jobs(event for event in state.facts.jobs if event.record.job in numbers)
    # A slice, since there may be no ended job.
    if reasons[-1:] == [ExitReason.DISK_FULL.value]:
        return "the disk is full: free some space"
    idle = idle_jobs([job for job in jobs if job.state.over], state.reached_at)
    if len(idle) < IDLE_JOBS:
        return ""
    # Their states are left out: the last job runs this, and the batch system does not know its end yet.
    return f"the last {len(idle)} jobs got nothing done: see {folder.job(idle[-1].number).log}"


def reasons_of_jobs(events: Iterable[Event]) -> list[str]:
    """Return the reported reasons for the ends of the run's jobs, in order of time."""
    ended = [event for event in events if event.kind == "job_ended"]
    return [event.record.reason for event in sorted(ended, key=lambda event: event.time)]


def idle_jobs(jobs: Sequence[Job], reached_at: float) -> list[Job]:
    """Return the jobs since the last progress that count as jobs without progress.

    Parameters
    ----------
    jobs : sequence of Job
        Jobs of one run, by number; all are over.
    reached_at : float
        Time of the last progress, as in `RunState`.
    """
    # With --chain a job is submitted before the previous one makes progress, which then clears both.
    idle = [job for job in jobs if job.submitted_at >= reached_at]
    failed = [job for job in idle if job.state is JobState.NODE_FAILED]
    forgiven = FREE if len(failed) > NODE_FAILURES else FREE | {JobState.NODE_FAILED}
    return [job for job in idle if job.state not in forgiven and job.exit_code != SUPERSEDED_EXIT]


def excluded_nodes(jobs: Iterable[Job], nodes: int, needed: int) -> tuple[str, ...]:
    """Return the nodes that failed in earlier jobs, as far as enough others are left.

    Parameters
    ----------
    nodes, needed : int
        Numbers of nodes of the site, and of the next job.
    """
    failed = sorted({node for job in jobs for node in job.failed_nodes})
    # Excluding too many nodes would keep the job waiting forever.
    return tuple(failed[: max(0, nodes - needed)])
