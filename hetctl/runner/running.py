"""Runs: submit, advance, cancel. A run goes from job to job until every member has converged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from hetctl.catalog.catalog import Catalog, RunRecord
from hetctl.control.budget import exceeded_by_jobs
from hetctl.core.errors import BadInputError, LockedError
from hetctl.core.job import Job, JobState
from hetctl.core.plan import Plan
from hetctl.core.run import Budget, RunSpec, write_spec
from hetctl.runner.collect import collect, refresh_jobs
from hetctl.runner.next_state import CANCELLED, FAILED, FINISHED, QUEUED, RUNNING, STOPPED, next_state
from hetctl.runner.planning import make_plan
from hetctl.runner.project import Project
from hetctl.runner.rendering import SubmitRequest, new_spec
from hetctl.runner.submission import adopt, new_job, rendered, submit_last

LOCK_PATIENCE_S, LOCK_POLL_S = 20.0, 0.5


@dataclass(frozen=True)
class Advance:
    """What became of a run.

    Parameters
    ----------
    job : Job or None
        The job that was submitted now.
    """

    run: str
    state: str
    reason: str
    job: Job | None = None


def submit(project: Project, request: SubmitRequest) -> Advance:
    """Start a run, or go on with the ensemble's unfinished one.

    Raises
    ------
    LockedError
        If another process is submitting, or a job of the run is queued or running.
    BatchSystemError
        If the batch system cannot be reached or refuses; a new run is then not begun.
    """
    with project.writing() as catalog:
        unfinished = _unfinished(catalog, request.plan.ensemble.name)
        if unfinished and (settled := _settle(project, catalog, unfinished)):
            return settled
        if unfinished and not request.new:
            return _go_on(project, catalog, unfinished, request.budget)
        plan = make_plan(catalog, request.plan)
        spec = replace(new_spec(project, catalog, request), planner=plan.planner)
        return _begin(project, catalog, spec, plan)


def advance(project: Project, run: str | None, *, after_job: int | None = None) -> Advance:
    """Collect a run's events and submit its next job, if there is work left and none is under way.

    Parameters
    ----------
    after_job : int or None
        Number of the job that is calling, at its end. It waits for a process that has the lock:
        nobody would submit the next job in its place.
    """
    patience_s = 0.0 if after_job is None else LOCK_PATIENCE_S
    with _writing(project, patience_s) as catalog:
        return _advance(project, catalog, record_of(catalog, run), after_job)


def chain(project: Project, run: str, behind: int) -> Advance:
    """Queue the next job behind one that has just started, so that it waits while that one runs."""
    with _writing(project, LOCK_PATIENCE_S) as catalog:
        record = record_of(catalog, run)
        if record.state not in (QUEUED, RUNNING):
            return Advance(run, record.state, record.reason)
        if settled := _settle(project, catalog, record):
            return settled
        jobs = catalog.jobs(run)
        if waiting := [job for job in jobs if job.number > behind and not job.state.over]:
            return Advance(run, record.state, f"job {waiting[0].batch_id} waits behind it already")
        if limit := exceeded_by_jobs(record.spec.budget, len(jobs)):
            return Advance(run, record.state, limit)
        return _submit_next(catalog, project, record.spec, jobs)


@contextmanager
def _writing(project: Project, patience_s: float) -> Iterator[Catalog]:
    """Open the catalog for writing, waiting for a process that has the lock."""
    end = time.monotonic() + patience_s
    with ExitStack() as stack:
        while True:
            try:
                catalog = stack.enter_context(project.writing())
                break
            except LockedError:
                if time.monotonic() >= end:
                    raise
            time.sleep(LOCK_POLL_S)
        yield catalog


def cancel(project: Project, run: str | None) -> Advance:
    """Cancel a run's jobs; its checkpoints stay, and `submit` goes on from them."""
    with project.writing() as catalog:
        record = record_of(catalog, run)
        spec = record.spec
        batch, folder = project.batch_system(spec.site), project.home.run(spec.run)
        if record.state in (FINISHED, FAILED):
            return Advance(spec.run, record.state, "there is nothing left to cancel")
        # First the state: a job that ends now must not submit the next one.
        catalog.set_run_state(spec.run, CANCELLED, "by hetctl cancel")
        _settle(project, catalog, record_of(catalog, spec.run))
        alive = [job for job in refresh_jobs(catalog, batch, folder) if not job.state.over]
        batch.cancel([job.batch_id for job in alive])
        collect(catalog, folder)
    return Advance(
        spec.run, CANCELLED, f"{len(alive)} jobs cancelled; `hetctl submit` goes on from the checkpoints"
    )


def settle(project: Project, run: str) -> None:
    """Finish a submission that was cut short, unless another process is at it."""
    with suppress(LockedError), project.writing() as catalog:
        _settle(project, catalog, record_of(catalog, run))


def record_of(catalog: Catalog, run: str | None) -> RunRecord:
    """Return a run's record, by default the newest's.

    Raises
    ------
    BadInputError
        If there is no such run.
    """
    records = catalog.runs()
    found = [record for record in records if run in (None, record.spec.run)]
    if not found:
        names = ", ".join(record.spec.run for record in records) or "none"
        raise BadInputError(
            f"no run {run or ''} in the catalog, which has: {names}", "start one with `hetctl submit`"
        )
    return found[-1]


def _unfinished(catalog: Catalog, ensemble: str) -> RunRecord | None:
    records = catalog.runs(ensemble)
    return records[-1] if records and records[-1].state not in (FINISHED, FAILED) else None


def _go_on(project: Project, catalog: Catalog, record: RunRecord, budget: Budget) -> Advance:
    """Take a run up as it was submitted, but for the budget, which is granted anew."""
    spec = replace(record.spec, budget=budget)
    folder, batch = project.home.run(spec.run), project.batch_system(spec.site)
    for job in refresh_jobs(catalog, batch, folder):
        if not job.state.over:
            raise LockedError(
                f"run {spec.run} is under way in job {job.batch_id} ({job.state.value})",
                "follow it with `hetctl status --watch`, or start another with `hetctl submit --new`",
            )
    write_spec(folder, spec)
    catalog.save_spec(spec)
    catalog.set_run_state(spec.run, QUEUED, "taken up again as it was submitted")
    return _advance(project, catalog, record_of(catalog, spec.run), taken_up=True)


def _begin(project: Project, catalog: Catalog, spec: RunSpec, plan: Plan) -> Advance:
    job = new_job(spec, catalog.identity, 0, 0)
    rendered(project, spec, [job])
    catalog.save_ensemble(spec.ensemble)
    catalog.save_site(spec.site)
    catalog.save_plan(spec.ensemble.name, spec.site.name, plan, time.time())
    catalog.add_run(spec, plan, time.time(), job)
    return _queued(catalog, spec, submit_last(project, catalog, spec, [job]))


def _advance(
    project: Project,
    catalog: Catalog,
    record: RunRecord,
    after_job: int | None = None,
    *,
    taken_up: bool = False,
) -> Advance:
    spec = record.spec
    if settled := _settle(project, catalog, record):
        return settled
    folder, batch = project.home.run(spec.run), project.batch_system(spec.site)
    jobs = refresh_jobs(catalog, batch, folder, after_job)
    collect(catalog, folder)
    if record.state in (FINISHED, FAILED, CANCELLED, STOPPED):
        return Advance(spec.run, record.state, record.reason)
    state, reason = next_state(spec, folder, jobs, taken_up)
    alive = [job for job in jobs if not job.state.over]
    if alive and not (state in (FINISHED, FAILED) and _are_queued(alive)):
        return _note(catalog, spec.run, RUNNING, f"job {alive[0].batch_id} is {alive[0].state.value}")
    if alive:
        batch.cancel([job.batch_id for job in alive])
        refresh_jobs(catalog, batch, folder)
    if state != QUEUED:
        return _note(catalog, spec.run, state, reason)
    return _submit_next(catalog, project, spec, jobs)


def _are_queued(jobs: Sequence[Job]) -> bool:
    """Whether none of them has started: what a chained job would find done, it need not start for."""
    return all(job.state is JobState.PENDING for job in jobs)


def _submit_next(catalog: Catalog, project: Project, spec: RunSpec, jobs: Sequence[Job]) -> Advance:
    job = new_job(spec, catalog.identity, len(jobs), project.home.run(spec.run).next_index())
    catalog.save_job(spec.run, job)
    return _queued(catalog, spec, submit_last(project, catalog, spec, [*jobs, job]))


def _settle(project: Project, catalog: Catalog, record: RunRecord) -> Advance | None:
    """Finish a submission that was cut short; None if there is none, or the run has been ended since."""
    spec, jobs = record.spec, catalog.jobs(record.spec.run)
    if not _in_submission(jobs):
        return None
    batch = project.batch_system(spec.site)
    job = adopt(catalog, batch, project.home.run(spec.run), jobs[-1])
    if record.state not in (QUEUED, RUNNING):
        if job is not None:
            batch.cancel([job.batch_id])
        else:
            catalog.remove_job(spec.run, jobs[-1].number)
        return None
    if job is not None:
        return _queued(catalog, spec, job, "is found: its submission had been cut short")
    return _queued(catalog, spec, submit_last(project, catalog, spec, jobs))


def _in_submission(jobs: Sequence[Job]) -> bool:
    return bool(jobs) and jobs[-1].state is JobState.SUBMITTING


def _note(catalog: Catalog, run: str, state: str, reason: str) -> Advance:
    catalog.set_run_state(run, state, reason)
    return Advance(run, state, reason)


def _queued(catalog: Catalog, spec: RunSpec, job: Job, what: str = "submitted") -> Advance:
    reason = f"job {job.batch_id} {what}"
    catalog.set_run_state(spec.run, QUEUED, reason)
    return Advance(spec.run, QUEUED, reason, job)
