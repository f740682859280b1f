"""What a run is made of, and its first job's script; nothing is submitted here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hetctl.catalog.catalog import Catalog
from hetctl.core.run import Budget, RunSpec
from hetctl.runner.planning import PlanRequest, make_plan
from hetctl.runner.profiles import member_profiles
from hetctl.runner.project import Project
from hetctl.runner.submission import Submission, new_job, rendered


@dataclass(frozen=True)
class SubmitRequest:
    """A plan that is to be run.

    Parameters
    ----------
    new : bool
        Start a new run even if there is an unfinished one of the ensemble.
    chain : bool
        Queue each next job behind the running one.
    """

    plan: PlanRequest
    budget: Budget = field(default_factory=Budget)
    retries: int = 2
    new: bool = False
    chain: bool = False


def preview(project: Project, request: SubmitRequest) -> Submission:
    """Render the first job of a new run; nothing is written or asked."""
    with project.reading() as catalog:
        make_plan(catalog, request.plan)
        spec = new_spec(project, catalog, request)
        return rendered(project, spec, [new_job(spec, catalog.identity, 0, 0)])


def render(project: Project, run: str, request: PlanRequest) -> Submission:
    """Render the first job of a run by that name from the ensemble and the site alone."""
    spec = _spec(project, run, SubmitRequest(request))
    return rendered(project, spec, [new_job(spec, "", 0, 0)])


def new_spec(project: Project, catalog: Catalog, request: SubmitRequest) -> RunSpec:
    """Return what a new run is made of, under a name that no run has had."""
    ensemble = request.plan.ensemble
    taken = {record.spec.run for record in catalog.runs()} | {
        path.name for path in project.home.runs.glob("*")
    }
    numbers = range(1, len(taken) + 2)
    run = next(name for n in numbers if (name := f"{ensemble.name}-{n:03d}") not in taken)
    site = request.plan.site
    return replace(
        _spec(project, run, request),
        profiles=member_profiles(catalog, ensemble, site),
        preprocess=tuple(catalog.preprocess(ensemble.name, site.name)),
    )


def _spec(project: Project, run: str, request: SubmitRequest) -> RunSpec:
    """Return what the request alone says."""
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
        profiles=(),
        checkpoints=str(project.home.path / "checkpoints"),
        options=plan.options,
        retries=request.retries,
        chain=request.chain,
        budget=request.budget,
        sharing=plan.sharing,
    )
