"""Runs: submit, advance, cancel. A run goes from job to job until every member has converged."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetctl.batch.base import BatchSystem
from hetctl.catalog.catalog import Catalog, RunRecord
from hetctl.control.budget import exceeded, exceeded_by_jobs
from hetctl.core.errors import BadInputError, HetctlError, LockedError
from hetctl.core.job import Job, JobState
from hetctl.core.layout import RunFolder, write_private
from hetctl.core.plan import Plan
from hetctl.core.profile import MemberProfile, Progress
from hetctl.core.progress import events_in, progress_of
from hetctl.core.run import Budget, RunSpec, write_spec
from hetctl.core.usage import usage_of
from hetctl.render import JobScript, render_job, submit_command
from hetctl.runner.collect import collect, refresh_jobs
from hetctl.runner.jobs import job_size
from hetctl.runner.planning import PlanRequest, make_plan, member_profiles
from hetctl.runner.project import Project

IDLE_JOBS = 2
"""So many jobs in a row without a finished epoch stop a run."""

LOCK_PATIENCE_S, LOCK_POLL_S = 20.0, 0.5

QUEUED, RUNNING, FINISHED, FAILED = "queued", "running", "finished", "failed"
CANCELLED, STOPPED = "cancelled", "stopped"


@dataclass(frozen=True)
class SubmitRequest:
    """A plan that is to be run.

    Parameters
    ----------
    new : bool
        Start a new run even if there is an unfinished one of the ensemble.
    """

    plan: PlanRequest
    budget: Budget = field(default_factory=Budget)
    retries: int = 2
    new: bool = False


@dataclass(frozen=True)
class Submission:
    """A job's script and the command that submits it."""

    run: str
    job: int
    path: Path
    script: str
    command: tuple[str, ...]


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


def preview(project: Project, request: SubmitRequest) -> Submission:
    """Render the first job of a new run; nothing is written or asked."""
    with project.reading() as catalog:
        make_plan(catalog, request.plan)
        spec = _new_spec(project, catalog, request)
    return _submission(project, project.home.run(spec.run), spec, 0)


def render(project: Project, run: str, request: PlanRequest) -> Submission:
    """Render the first job of a run by that name from the ensemble and the site alone."""
    spec = _spec(project, run, SubmitRequest(request), ())
    return _submission(project, project.home.run(run), spec, 0)


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
        unfinished = None if request.new else _unfinished(catalog, request.plan.ensemble.name)
        if unfinished:
            return _go_on(project, catalog, unfinished, request.budget)
        plan = make_plan(catalog, request.plan)
        spec = replace(_new_spec(project, catalog, request), planner=plan.planner)
        return _begin(project, catalog, spec, plan)


def advance(project: Project, run: str | None, *, after_job: int | None = None) -> Advance:
    """Collect a run's events and submit its next job, if there is work left and none is under way.

    Parameters
    ----------
    after_job : int or None
        Number of the job that is calling, at its end. It waits for a process that has the lock:
        nobody would submit the next job in its place.
    """
    end = time.monotonic() + (0.0 if after_job is None else LOCK_PATIENCE_S)
    while True:
        try:
            with project.writing() as catalog:
                return _advance(project, catalog, record_of(catalog, run), after_job)
        except LockedError:
            if time.monotonic() >= end:
                raise
        time.sleep(LOCK_POLL_S)


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
        alive = [job for job in refresh_jobs(catalog, batch, folder) if not job.state.over]
        batch.cancel([job.batch_id for job in alive])
        collect(catalog, folder)
    return Advance(
        spec.run, CANCELLED, f"{len(alive)} jobs cancelled; `hetctl submit` goes on from the checkpoints"
    )


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
    return _advance(project, catalog, record_of(catalog, spec.run), None)


def _begin(project: Project, catalog: Catalog, spec: RunSpec, plan: Plan) -> Advance:
    folder = project.home.run(spec.run)
    batch = project.batch_system(spec.site)
    submission = _submission(project, folder, spec, 0)
    catalog.save_ensemble(spec.ensemble)
    catalog.save_site(spec.site)
    catalog.save_plan(spec.ensemble.name, spec.site.name, plan, time.time())
    try:
        folder.round(0).create()
        write_spec(folder, spec)
        job = _submit_job(batch, folder, spec, submission)
    except (HetctlError, OSError):
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    catalog.add_run(spec, plan, time.time())
    return _queued(catalog, spec, job)


def _advance(project: Project, catalog: Catalog, record: RunRecord, after_job: int | None) -> Advance:
    spec = record.spec
    folder, batch = project.home.run(spec.run), project.batch_system(spec.site)
    jobs = refresh_jobs(catalog, batch, folder, after_job)
    collect(catalog, folder)
    if record.state in (FINISHED, FAILED, CANCELLED, STOPPED):
        return Advance(spec.run, record.state, record.reason)
    if alive := [job for job in jobs if not job.state.over]:
        return _note(catalog, spec.run, RUNNING, f"job {alive[-1].batch_id} is {alive[-1].state.value}")
    progress = progress_of(spec.ensemble, events_in(folder), spec.retries)
    state, reason = _next_state(spec, folder, jobs, progress)
    if state != QUEUED:
        return _note(catalog, spec.run, state, reason)
    number = len(jobs)
    job = _submit_job(batch, folder, spec, _submission(project, folder, spec, number))
    return _queued(catalog, spec, job)


def _next_state(
    spec: RunSpec, folder: RunFolder, jobs: Sequence[Job], progress: dict[str, Progress]
) -> tuple[str, str]:
    """Say where a run without a living job goes; ``queued`` asks for another job."""
    if not any(member.active for member in progress.values()):
        failed = [name for name, member in progress.items() if member.failed]
        return (
            (FAILED, f"{len(failed)} members failed") if failed else (FINISHED, "every member has converged")
        )
    usage = usage_of(events_in(folder), time.time())
    if limit := exceeded_by_jobs(spec.budget, len(jobs)) or exceeded(spec.budget, usage):
        return STOPPED, limit
    if _idle(jobs, progress):
        return STOPPED, f"the last {IDLE_JOBS} jobs finished no epoch: see the logs below {folder.path}"
    return QUEUED, ""


def _idle(jobs: Sequence[Job], progress: dict[str, Progress]) -> bool:
    """Whether the last jobs got nothing done."""
    if len(jobs) < IDLE_JOBS:
        return False
    since = jobs[-IDLE_JOBS].submitted_at
    return not any(epoch.finished_at > since for member in progress.values() for epoch in member.epochs)


def _note(catalog: Catalog, run: str, state: str, reason: str) -> Advance:
    catalog.set_run_state(run, state, reason)
    return Advance(run, state, reason)


def _submit_job(batch: BatchSystem, folder: RunFolder, spec: RunSpec, submission: Submission) -> Job:
    first_round = folder.next_index() if submission.job else 0
    folder.round(first_round).create()
    write_private(submission.path, submission.script)
    batch_id = batch.submit(submission.path, submission.command, spec.wall_s)
    nodes = -(-spec.gpus // spec.site.gpus_per_node)
    return Job(submission.job, first_round, batch_id, JobState.PENDING, nodes, spec.wall_s, time.time())


def _queued(catalog: Catalog, spec: RunSpec, job: Job) -> Advance:
    catalog.save_job(spec.run, job)
    reason = f"job {job.batch_id} submitted"
    catalog.set_run_state(spec.run, QUEUED, reason)
    return Advance(spec.run, QUEUED, reason, job)


def _submission(project: Project, folder: RunFolder, spec: RunSpec, number: int) -> Submission:
    size = job_size(spec.site, spec.gpus, spec.wall_s, spec.queue)
    job = JobScript(
        run=spec.run,
        job=number,
        name=f"hetctl-{spec.run}-{number}",
        run_folder=folder.path,
        first_round=folder.round(folder.next_index() if number else 0),
        site=spec.site,
        queue=size.queue,
        nodes=size.nodes,
        wall_s=spec.wall_s,
        grace_s=spec.grace_s,
        python=sys.executable,
        home=project.home.path,
    )
    script = render_job(job, project.template_folders)
    return Submission(spec.run, number, job.first_round.script, script, submit_command(job))


def _new_spec(project: Project, catalog: Catalog, request: SubmitRequest) -> RunSpec:
    ensemble = request.plan.ensemble
    taken = {record.spec.run for record in catalog.runs()} | {
        path.name for path in project.home.runs.glob("*")
    }
    numbers = range(1, len(taken) + 2)
    run = next(name for n in numbers if (name := f"{ensemble.name}-{n:03d}") not in taken)
    return _spec(project, run, request, member_profiles(catalog, ensemble, request.plan.site))


def _spec(project: Project, run: str, request: SubmitRequest, profiles: tuple[MemberProfile, ...]) -> RunSpec:
    plan = request.plan
    return RunSpec(
        run=run,
        ensemble=plan.ensemble,
        site=plan.site,
        planner=plan.planner,
        gpus=plan.size.gpus,
        queue=plan.size.queue.name,
        wall_s=plan.size.wall_s,
        grace_s=plan.size.grace_s,
        profiles=profiles,
        checkpoints=str(project.home.path / "checkpoints"),
        options=plan.options,
        retries=request.retries,
        budget=request.budget,
    )
