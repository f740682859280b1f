"""The size of a run's jobs: what the user says, and the job planner for the rest."""

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
    """What the user says of a job's size; None leaves it to the job planner."""

    gpus: int | None = None
    wall_s: int | None = None
    queue: str | None = None


@dataclass(frozen=True)
class JobSizeChoice:
    """The size of a run's jobs, and the others that were looked at, if any were."""

    size: JobSize
    chosen: JobSizeOption | None = None
    prospects: tuple[JobSizeOption, ...] = ()


def sizing(
    project: Project, ensemble: Ensemble, site: Site, wishes: JobSizeRequest, budget: Budget
) -> JobSizeChoice:
    """Choose by the profile; where there is none yet, the whole site for two hours at most.

    Raises
    ------
    BadInputError
        If the site has no such queue.
    InfeasibleError
        If no queue takes such a job.
    """
    members = _members(project, ensemble, site)
    if not members or (wishes.gpus and wishes.wall_s):
        return JobSizeChoice(job_size(site, wishes.gpus, wishes.wall_s, wishes.queue))
    chosen, found = planned_size(site, members, wishes.gpus, wishes.wall_s, wishes.queue, budget)
    return JobSizeChoice(chosen.size, chosen, tuple(found))


def _members(project: Project, ensemble: Ensemble, site: Site) -> Sequence[Workload]:
    """Return the members as planners see them; nothing if one has no profile."""
    if not project.home.catalog.exists():
        return ()
    with project.reading() as catalog:
        profiles = {profile.member: profile for profile in member_profiles(catalog, ensemble, site)}
    if set(profiles) < {member.name for member in ensemble.members}:
        return ()
    return active_workloads(ensemble, profiles, {}, site.gpus, site.gpus_per_node)
