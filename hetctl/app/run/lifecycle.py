"""Submission, advance and cancellation of runs, which take one or more jobs until all members converged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hetctl.app.plan.planning import PlanRequest
from hetctl.app.project import Project
from hetctl.app.run.changes import Change
from hetctl.app.run.continue_run import RequestedOptions, continued, has_work, with_input
from hetctl.app.run.job_states import (
    at_work,
    claimant_in,
    current_jobs,
    job_events,
    reason_to_end,
    refresh_jobs,
    save_jobs,
)
from hetctl.app.run.select_run import record_of, require_folder
from hetctl.app.run.spec import planned_run
from hetctl.app.run.submission import (
    NextJob,
    adopt,
    identity_of,
    in_submission,
    next_job_of,
    rendered,
    submit_last,
)
from hetctl.catalog.catalog import Catalog
from hetctl.catalog.stored_runs import RunRecord
from hetctl.cluster.batch.base import SubmissionInDoubtError
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BatchSystemError, LockedError
from hetctl.model.events import Request
from hetctl.model.job import (
    CANCELLED,
    ENDED,
    UNDER_WAY,
    Job,
    JobState,
    RunReason,
    check_job_removal,
    run_after,
)
from hetctl.model.run import RunSpec
from hetctl.model.values import dataclass
from hetctl.storage.atomic_io import write_private
from hetctl.storage.kept_modules import keep_modules
from hetctl.storage.lease import release_ended
from hetctl.storage.patience import PATIENT
from hetctl.storage.purge import kept_files, renew
from hetctl.storage.run_files import write_spec

JOB_LOCK_PATIENCE_S = 30.0
"""Seconds that a job's script waits for the lock: no other process would submit the next job in its place."""


@dataclass(frozen=True)
class RunTransition:
    """New state of a run after a command.

    Parameters
    ----------
    job : Job or None
        Job that was submitted now.
    changed : tuple of Change
        Changes of the run from now on.
    track : str
        Same as in `RunSpec`, after `advance`.
    members : tuple of str
        Members that a request concerns.
    want : Request or None
        That request.
    """

    run: str
    state: str
    reason: str
    job: Job | None = None
    changed: tuple[Change, ...] = ()
    track: str = ""
    members: tuple[str, ...] = ()
    want: Request | None = None


def submit(
    project: Project, request: PlanRequest, requested: RequestedOptions, *, new: bool = False
) -> RunTransition:
    """Start a run.

    Parameters
    ----------
    new : bool
        True to start a new run even if there is an unfinished one of the ensemble.

    Raises
    ------
    LockedError
        If another process is submitting, or has just started a run.
    BatchSystemError
        If the batch system cannot be reached or refuses; the run is then not begun.
    """
    with project.writing(create=True) as catalog:
        earlier = None if new else catalog.newest_run(request.ensemble.name)
        if earlier and earlier.state not in ENDED:
            # An interrupted submission is finished before another begins, or two jobs would train the run.
            if submitted := _finish_submission(project, catalog, earlier):
                return submitted
            raise LockedError(
                f"run {earlier.spec.run} is under way: another process has just started it",
                "follow it with `hetctl status --watch`, or start another with `hetctl submit --new`",
            )
        # Rendered before anything is stored: what cannot be rendered leaves no run behind.
        first = planned_run(project, catalog, request, requested)
        return _with_queue(project, catalog, _begin(project, catalog, first, requested.replay))


def continue_run(
    project: Project, run: str, ensemble: Ensemble, requested: RequestedOptions
) -> RunTransition:
    """Continue a run, with the new options and files that may change.

    Raises
    ------
    BadInputError, InfeasibleError
        As in `continued`; nothing is then changed.
    LockedError
        If another process is submitting, or a job of the run is queued or running.
    BatchSystemError
        If the batch system cannot be reached or refuses; the run is then unchanged.
    """
    with project.writing() as catalog:
        continued_run = _continue(project, catalog, record_of(catalog, run), ensemble, requested)
        return _with_queue(project, catalog, continued_run)


def advance(
    project: Project,
    run: str | None,
    *,
    after_job: int | None = None,
    patience_s: float = JOB_LOCK_PATIENCE_S,
) -> RunTransition:
    """Submit a run's next job, if there is work left and no job is queued or running.

    Parameters
    ----------
    after_job : int or None
        Number of the job that calls this at its end.
    patience_s : float
        Seconds to wait while another process has the lock.
    """

    def advance_now() -> RunTransition:
        with project.writing(patience_s=patience_s) as catalog:
            record = record_of(catalog, run)
            advanced = _advance(project, catalog, record, after_job)
            if (purge := record.spec.site.purge) and purge.touch:
                files = kept_files(project.home.run(record.spec.run), Path(record.spec.checkpoints))
                renew(files, time.time())
            return replace(_with_queue(project, catalog, advanced), track=record.spec.track)

    return PATIENT.call(advance_now)


def chain(project: Project, run: str, behind: int) -> RunTransition:
    """Queue the next job behind one that has just started."""
    return PATIENT.call(_chain, project, run, behind)


def _chain(project: Project, run: str, behind: int) -> RunTransition:
    with project.writing(patience_s=JOB_LOCK_PATIENCE_S) as catalog:
        return _queue_behind(project, catalog, record_of(catalog, run), behind)


def _queue_behind(project: Project, catalog: Catalog, record: RunRecord, behind: int) -> RunTransition:
    spec, run = record.spec, record.spec.run
    if record.state not in UNDER_WAY:
        return RunTransition(run, record.state, record.reason)
    if submitted := _finish_submission(project, catalog, record, own_job=behind):
        return submitted
    folder = project.home.run(run)
    jobs = refresh_jobs(catalog, project.batch_system(spec.site), folder)
    # A requeued job starts twice, and must queue its successor only once.
    if waiting := [job for job in jobs if job.number > behind and not job.state.over]:
        return RunTransition(run, record.state, f"job {waiting[0].batch_id} waits behind it already")
    # The script of a killed job could not note this.
    if end := reason_to_end(spec, folder, jobs):
        return RunTransition(run, record.state, end[1])
    return _submit_next(project, catalog, _next_job(project, catalog, spec, jobs))


def _with_queue(project: Project, catalog: Catalog, first: RunTransition) -> RunTransition:
    """Queue further jobs of a run behind one that was submitted now, as many as its specification says.

    The first one is submitted, and the run goes on, if the batch system refuses one of the others.
    """
    if first.job is None:
        return first
    last, behind, obstacle = first.job, [], ""
    for _ in range(record_of(catalog, first.run).spec.ahead - 1):
        try:
            following = _queue_behind(project, catalog, record_of(catalog, first.run), last.number)
        except BatchSystemError as error:
            obstacle = error.message
            break
        if following.job is None:
            obstacle = following.reason
            break
        last = following.job
        behind.append(last.batch_id)
    queued = f"; behind it {', '.join(behind)}" if behind else ""
    return replace(first, reason=f"{first.reason}{queued}{f'; no more: {obstacle}' if obstacle else ''}")


def cancel(project: Project, run: str | None) -> RunTransition:
    """Cancel a run's jobs; its checkpoints are kept, and `submit` continues from them."""
    with project.writing() as catalog:
        record = record_of(catalog, run)
        spec = record.spec
        batch, folder = project.batch_system(spec.site), project.home.run(spec.run)
        if record.state in ENDED:
            return RunTransition(spec.run, record.state, "there is nothing left to cancel")
        # Set the state first: a job that ends now must not submit the next one.
        cancelled = _note(catalog, spec.run, RunReason.CANCELLED, "by hetctl cancel")
        _finish_submission(project, catalog, record_of(catalog, spec.run))
        alive = [job for job in refresh_jobs(catalog, batch, folder) if not job.state.over]
        batch.cancel([job.batch_id for job in alive])
    jobs = ", ".join(f"job {job.batch_id}" for job in alive) or "no job"
    next_step = "`hetctl submit` goes on from the checkpoints"
    if not folder.spec.exists():
        next_step = f"{folder.path} is gone: `hetctl submit --new` starts another run"
    return replace(cancelled, reason=f"{jobs} cancelled; {next_step}")


def _continue(
    project: Project, catalog: Catalog, record: RunRecord, ensemble: Ensemble, requested: RequestedOptions
) -> RunTransition:
    run = record.spec.run
    folder = require_folder(project, record, catalog.jobs(run))
    now = with_input(project, record.spec, ensemble, requested)
    if not has_work(folder, record.spec, now):
        if record.state in ENDED:
            return RunTransition(run, record.state, record.reason)
        _note(catalog, run, RunReason.CONTINUED, "to be ended")
        ended = _advance(project, catalog, record_of(catalog, run))
        if ended.state in UNDER_WAY and not ended.job:
            raise LockedError(
                f"run {run} has trained all members, and is about to end: {ended.reason}",
                "repeat the command in some seconds, or start another run with `hetctl submit --new`",
            )
        return ended
    spec, changed = continued(project, catalog, record.spec, now, requested)
    if submitted := _finish_submission(project, catalog, record, spec if changed else None):
        return replace(submitted, changed=changed)
    batch, events = project.batch_system(spec.site), job_events(folder)
    jobs = current_jobs(catalog.jobs(run), batch, events, claimant=claimant_in(folder))
    # The user may go on while a job is about to end; the next job waits for it.
    alive = [job.batch_id for job in jobs if not job.state.over]
    if record.state == CANCELLED:
        batch.cancel(alive)
    else:
        for job in at_work(jobs, folder):
            raise LockedError(
                f"run {run} is under way in job {job.batch_id} ({job.state.value})",
                "follow it with `hetctl status --watch`; `hetctl add`, `drop` and `change` edit it;"
                " `hetctl submit --new` starts another",
            )
    spec = replace(spec, earlier_jobs=len(jobs))
    end = reason_to_end(spec, folder, jobs)
    # Rendered before anything is stored: a template that cannot be rendered leaves all as it is.
    following = end or _next_job(project, catalog, spec, jobs)
    save_jobs(catalog, run, jobs)
    if isinstance(following, NextJob):
        transition = _submit_next(project, catalog, following, continued_from=record.spec)
        waits = f"{transition.reason}; it starts when job {alive[-1]} has ended" if alive else ""
        transition = replace(transition, reason=waits or transition.reason)
    else:
        _record_continued(project, catalog, spec)
        transition = _note(catalog, run, *following)
    return replace(transition, changed=changed)


def _record_continued(project: Project, catalog: Catalog, spec: RunSpec) -> None:
    folder = project.home.run(spec.run)
    keep_modules(spec, folder)
    # They were judged by the stop rules so far.
    folder.results.unlink(missing_ok=True)
    _save(project, catalog, spec)
    _note(catalog, spec.run, RunReason.CONTINUED, "continued")


def _save(project: Project, catalog: Catalog, spec: RunSpec) -> None:
    write_spec(project.home.run(spec.run), spec)
    catalog.save_spec(spec)


def _begin(project: Project, catalog: Catalog, new: NextJob, replay: Path | None) -> RunTransition:
    spec, plan = new.spec, new.plan
    assert plan is not None
    catalog.save_ensemble(spec.ensemble)
    catalog.save_site(spec.site)
    if plan != catalog.latest_plan(spec.ensemble.name, spec.site.name):
        catalog.save_plan(spec.ensemble.name, spec.site.name, plan, time.time())
    if replay:
        # Kept before the run is known: a command that finishes an interrupted submission lacks the file.
        write_private(project.home.run(spec.run).create().replay, replay.read_text(encoding="utf-8-sig"))
    # For the same reason, as the modules may be edited until then.
    keep_modules(spec, project.home.run(spec.run))
    # The run and its job in doubt are stored together, before the batch system gets the job.
    catalog.add_run(spec, plan, time.time(), new.jobs[-1])
    return _queued(catalog, spec, *submit_last(project, catalog, spec, new.jobs, new.submission))


def _advance(
    project: Project, catalog: Catalog, record: RunRecord, after_job: int | None = None
) -> RunTransition:
    spec = record.spec
    if submitted := _finish_submission(project, catalog, record, own_job=after_job):
        return submitted
    folder = require_folder(project, record, catalog.jobs(spec.run))
    batch = project.batch_system(spec.site)
    if after_job is not None:
        release_ended(folder, after_job)
    jobs = refresh_jobs(catalog, batch, folder, after_job)
    if record.state not in UNDER_WAY:
        return RunTransition(spec.run, record.state, record.reason)
    # Waiting jobs have used no budget, and are not needed if earlier ones end the run.
    end = reason_to_end(spec, folder, [job for job in jobs if job.state is not JobState.PENDING])
    alive = [job for job in jobs if not job.state.over]
    # A chained job of a run that ends need not start.
    if alive and not (end and all(job.state is JobState.PENDING for job in alive)):
        waits = f"job {alive[0].batch_id} is {alive[0].state.value}"
        return _note(catalog, spec.run, RunReason.JOB_ALIVE, waits)
    if alive:
        batch.cancel([job.batch_id for job in alive])
        refresh_jobs(catalog, batch, folder)
    if end:
        return _note(catalog, spec.run, *end)
    return _submit_next(project, catalog, _next_job(project, catalog, spec, jobs))


def _next_job(project: Project, catalog: Catalog, spec: RunSpec, jobs: Sequence[Job]) -> NextJob:
    job = next_job_of(spec, project.home.run(spec.run), identity_of(project, catalog), jobs)
    jobs = (*jobs[: job.number], job)
    return NextJob(spec, jobs, rendered(project, spec, jobs))


def _submit_next(
    project: Project, catalog: Catalog, new: NextJob, *, continued_from: RunSpec | None = None
) -> RunTransition:
    """Submit the next job.

    Parameters
    ----------
    continued_from : RunSpec or None
        Specification of the run so far, if the user changes it; None: it stays.
    """
    spec = new.spec
    if continued_from:
        _record_continued(project, catalog, spec)
    # As SUBMITTING, before the batch system gets it: after a crash the next command searches for it.
    catalog.save_job(spec.run, new.jobs[-1])
    try:
        return _queued(catalog, spec, *submit_last(project, catalog, spec, new.jobs, new.submission))
    except SubmissionInDoubtError:
        raise
    except BatchSystemError:
        # `submit_last` removes the run if it had no other job.
        if continued_from and catalog.run(spec.run):
            _save(project, catalog, continued_from)
        raise


def _finish_submission(
    project: Project,
    catalog: Catalog,
    record: RunRecord,
    changed: RunSpec | None = None,
    own_job: int | None = None,
) -> RunTransition | None:
    """Finish an interrupted submission; return None if there is none, or the run has been ended since.

    Parameters
    ----------
    changed : RunSpec or None
        Specification of the run from now on. A job that the batch system does not have is submitted with
        it; any other is left to the caller.
    own_job : int or None
        Number of the calling job, which is in doubt itself if no command has looked for it since; None is
        then returned.
    """
    spec, jobs = record.spec, catalog.jobs(record.spec.run)
    if not in_submission(jobs):
        return None
    batch = project.batch_system(spec.site)
    job = adopt(catalog, batch, project.home.run(spec.run), jobs[-1], project.waits.settle_s)
    if record.state not in UNDER_WAY:
        if job is not None:
            batch.cancel([job.batch_id])
        else:
            check_job_removal(jobs[-1].state)
            catalog.remove_job(spec.run, jobs[-1].number)
        return None
    if job is None:
        next_job = _next_job(project, catalog, changed or spec, jobs)
        submitted = _submit_next(project, catalog, next_job, continued_from=spec if changed else None)
    elif changed is not None:
        return None
    else:
        submitted = _queued(catalog, spec, job, "is found: its submission had been cut short")
    return None if jobs[-1].number == own_job else submitted


def _note(catalog: Catalog, run: str, reason: RunReason, text: str) -> RunTransition:
    """Store the state of a run that follows from its present one, with a text for the user."""
    state = run_after(catalog.run_state(run), reason)
    catalog.set_run_state(run, state, text)
    return RunTransition(run, state, text)


def _queued(catalog: Catalog, spec: RunSpec, job: Job, what: str) -> RunTransition:
    return replace(_note(catalog, spec.run, RunReason.SUBMITTED, f"job {job.batch_id} {what}"), job=job)
