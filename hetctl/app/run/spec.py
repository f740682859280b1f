"""Specification of a run, and its first job's script; nothing is submitted here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hetctl.app.plan.planning import AUTO, PlanRequest, saved_or_new_plan, with_profiles
from hetctl.app.project import Project
from hetctl.app.run.continue_run import (
    RequestedOptions,
    check_replay,
    continued,
    has_work,
    plan_of_rest,
    with_input,
)
from hetctl.app.run.job_states import ended_by_files, job_events
from hetctl.app.run.select_run import record_of, require_folder
from hetctl.app.run.submission import NextJob, Submission, identity_of, new_job, next_job_of, rendered
from hetctl.catalog.catalog import Catalog
from hetctl.model.combinations import HOPS, features_of, refuse_conflicts
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.job import JobState, moved
from hetctl.model.plan import BALANCED, DATA_PARALLEL, HOPPER, PIPELINE, USUAL_PLANNER, Plan
from hetctl.model.run import RunSpec
from hetctl.perf.preprocessing import seen_points
from hetctl.storage.kept_modules import modules_of, revision_of


def planned_run(
    project: Project, catalog: Catalog, request: PlanRequest, requested: RequestedOptions
) -> NextJob:
    """Plan a new run and render its first job; nothing is written or queried.

    Raises
    ------
    InfeasibleError
        If the first round does not fit the nodes as planned.
    """
    measured = with_profiles(catalog, request)
    plan = saved_or_new_plan(catalog, measured)
    # A run keeps its site as the file has it, without links that were measured.
    spec = new_spec(project, catalog, replace(request, profiles=measured.profiles), requested)
    spec = as_planned(spec, plan, measured)
    job = new_job(spec, identity_of(project, catalog), 0)
    return NextJob(spec, (job,), rendered(project, spec, [job], plan), plan)


def preview(project: Project, request: PlanRequest, requested: RequestedOptions) -> NextJob:
    """Render the first job of a new run; nothing is written or queried."""
    with project.reading(or_empty=True) as catalog:
        return planned_run(project, catalog, request, requested)


def preview_next(project: Project, run: str, ensemble: Ensemble, requested: RequestedOptions) -> NextJob:
    """Render the next job of a run that continues; nothing is written or queried.

    Raises
    ------
    BadInputError
        If no training is left, or a requested change is not permitted.
    InfeasibleError
        If its jobs permit no progress.
    """
    with project.reading() as catalog:
        record = record_of(catalog, run)
        folder = require_folder(project, record, catalog.jobs(run))
        now = with_input(project, record.spec, ensemble, requested)
        if not has_work(folder, record.spec, now):
            raise BadInputError(
                f"run {run} has nothing left to train", "start another with `hetctl submit --new`"
            )
        spec, changed = continued(project, catalog, record.spec, now, requested)
        jobs = ended_by_files(catalog.jobs(run), job_events(folder), done=False, silent=True)
        alive = [job for job in jobs if not job.state.over and job.batch_id]
        behind = f"job {alive[-1].batch_id}, last seen {alive[-1].state.value}," if alive else ""
        next_job = next_job_of(spec, folder, identity_of(project, catalog), jobs)
        # Only its jobs know in which of several phases the run will be.
        plan = plan_of_rest(project, catalog, spec) if len(spec.phases) == 1 else None
    earlier = [moved(job, JobState.FINISHED) if job in alive else job for job in jobs]
    shown = (*earlier[: next_job.number], next_job)
    return NextJob(spec, shown, rendered(project, spec, shown, plan), plan, changed, behind)


def render(project: Project, run: str, request: PlanRequest) -> Submission:
    """Render the first job of a run of that name; its first round is known if all members have profiles."""
    spec = _spec(project, run, request, RequestedOptions())
    plan = None
    if project.home.catalog.exists():
        with project.reading() as catalog:
            measured = with_profiles(catalog, request)
            if measured.profiles.keys() >= {member.name for member in request.ensemble.members}:
                plan = saved_or_new_plan(catalog, measured)
    return rendered(project, spec, [new_job(spec, "", 0)], plan)


def new_spec(
    project: Project, catalog: Catalog, request: PlanRequest, requested: RequestedOptions
) -> RunSpec:
    """Return the specification of a new run, under an unused name.

    Raises
    ------
    BadInputError
        If the trace to be replayed is wrong, or the modules cannot be copied.
    """
    ensemble = request.ensemble
    if requested.replay:
        check_replay(requested.replay, ensemble, request.mode)
    # A crash may have left a folder without an entry; and no run may find the checkpoints of another.
    home = project.home
    folders = (*home.runs.glob("*"), *home.checkpoints.glob("*"), *home.removed.glob("*"))
    taken = {*catalog.run_names(), *(path.name for path in folders)}
    numbers = range(1, len(taken) + 2)
    run = next(name for n in numbers if (name := f"{ensemble.name}-{n:03d}") not in taken)
    return replace(
        _spec(project, run, request, requested),
        profiles=tuple(request.profiles.values()),
        preprocess=tuple(catalog.preprocess(ensemble.name, request.site.name))
        or seen_points(profile.preparation_rate for profile in request.profiles.values()),
        replay=str(project.home.run(run).replay.resolve()) if requested.replay else "",
        modules=modules_of(ensemble),
        revision=revision_of(Path(ensemble.folder)),
    )


def as_planned(spec: RunSpec, plan: Plan, request: PlanRequest) -> RunSpec:
    """Return a specification with the plan's choices: planner, phases and, if members balance, mixed types.

    Parameters
    ----------
    request : PlanRequest
        Input of the plan, with the measured layers and links.

    Raises
    ------
    BadInputError
        If members cannot hop, or train as pipelines, in such jobs.
    """
    phases = tuple(phase.mode for phase in plan.phases) or (DATA_PARALLEL,)
    modes = set(phases)
    if HOPPER in modes:
        # Ranks that read partitions share nothing, even if data-parallel members are cached.
        refuse_conflicts(
            *(spec.ensemble.name, HOPS, *features_of(spec.ensemble)),
            launch=spec.site.launch,
            sharing=spec.sharing,
        )
    mixed = {"mix_types": True} if BALANCED in modes else {}
    # No planner was chosen for a plan without rounds.
    planner = USUAL_PLANNER if plan.planner == AUTO else plan.planner
    predicted_s = plan.predicted_makespan_s if all(profile.has_rates for profile in spec.profiles) else None
    spec = replace(
        spec,
        planner=planner,
        phases=phases,
        options={**spec.options, **mixed},
        predicted_s=predicted_s,
    )
    if not any(allocation.mode == PIPELINE for each in plan.rounds for allocation in each.allocations):
        return spec
    # Imported here since other runs need nothing of pipelines.
    from hetctl.app.plan.pipeline_phases import with_pipelines

    return with_pipelines(spec, plan, request)


def _spec(project: Project, run: str, request: PlanRequest, requested: RequestedOptions) -> RunSpec:
    return RunSpec(
        run=run,
        ensemble=request.ensemble,
        site=request.site,
        planner=request.planner,
        gpus=request.size.gpus,
        queue=request.size.queue.name,
        wall_s=request.size.wall_s,
        grace_s=request.size.grace_s,
        profiles=(),
        checkpoints=str(project.home.checkpoints),
        options=request.options,
        budget=requested.budget,
        sharing=request.sharing,
        mode=request.mode,
        given=requested.given,
        retries=RunSpec.retries if requested.retries is None else requested.retries,
        chain=requested.chain == 1,
        ahead=requested.chain or 1,
        track=requested.track or "",
    )
