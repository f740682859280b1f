"""Size of a run's jobs: the user's values, and the job planner's for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetctl.app.plan.job_request import job_size, planned_size
from hetctl.app.profile.known import member_profiles
from hetctl.app.project import Project
from hetctl.model.ensemble import Ensemble
from hetctl.model.job import JobSize, JobSizeOption
from hetctl.model.run import Budget
from hetctl.model.site import Site
from hetctl.model.workload import Workload
from hetctl.perf.workloads import active_workloads


@dataclass(frozen=True)
class JobSizeRequest:
    """User's values for the size of a job; None leaves one to the job planner."""

    gpus: int | None = None
    wall_s: int | None = None
    queue: str | None = None


@dataclass(frozen=True)
class JobSizeChoice:
    """Size of a run's jobs, and the other sizes considered, if any."""

    size: JobSize
    chosen: JobSizeOption | None = None
    prospects: tuple[JobSizeOption, ...] = ()


def sizing(
    project: Project, ensemble: Ensemble, site: Site, wishes: JobSizeRequest, budget: Budget
) -> JobSizeChoice:
    """Choose the size by the profile; without a profile, the whole site for at most two hours.

    Raises
    ------
    BadInputError
        If the site has no such queue.
    InfeasibleError
        If no queue accepts such a job.
    """
    members = _members(project, ensemble, site)
    if not members or (wishes.gpus and wishes.wall_s):
        return JobSizeChoice(job_size(site, wishes.gpus, wishes.wall_s, wishes.queue))
    chosen, found = planned_size(site, members, wishes.gpus, wishes.wall_s, wishes.queue, budget)
    return JobSizeChoice(chosen.size, chosen, tuple(found))


def _members(project: Project, ensemble: Ensemble, site: Site) -> Sequence[Workload]:
    """Return the members as workloads; nothing if one has no profile."""
    if not project.home.catalog.exists():
        return ()
    with project.reading() as catalog:
        profiles = {profile.member: profile for profile in member_profiles(catalog, ensemble, site)}
    if set(profiles) < {member.name for member in ensemble.members}:
        return ()
    return active_workloads(ensemble, profiles, {}, site.gpus, site.gpus_per_node)
