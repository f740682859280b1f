"""Planning: from the profiles in the catalog to a plan, offline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetctl.catalog.catalog import Catalog
from hetctl.core.ensemble import Ensemble
from hetctl.core.errors import BadInputError, InfeasibleError
from hetctl.core.job import JobSize
from hetctl.core.plan import Plan
from hetctl.core.profile import MemberProfile, ProfilePoint, Progress
from hetctl.core.run import CACHED, LOCKSTEP
from hetctl.core.site import Cluster, Site
from hetctl.perf.work import candidates
from hetctl.planners import planner_named
from hetctl.planners.base import Options, options_from
from hetctl.runner.project import Project
from hetctl.simulator.auto import Choice, choose
from hetctl.simulator.forecast import forecast
from hetctl.simulator.world import Arrival, Clock, World

AUTO = "auto"
"""Stands for the planner that a simulation finds best."""
IMPORTED = "imported"
"""The framework, and the site, of an ensemble that is a rate table and nothing else."""
ROUND_OVERHEAD_S = 0.5
"""From the end of one round to the launch of the next, in the same job."""
JOB_OVERHEAD_S = 3.0
"""From the end of one job to the start of the next, waiting in the queue left out."""
DAY_S = 86400
OLD_S = 90 * DAY_S
"""A profile of this age is warned of."""


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is asked for.

    Parameters
    ----------
    planner : str
        A planner's name, or ``auto``.
    options : mapping
        The planner's, as in `planners.base.Options`.
    explain : bool
        Say of each round why its members got their GPUs and the others wait.
    sharing : str
        As in `RunSpec`.
    """

    ensemble: Ensemble
    site: Site
    size: JobSize
    planner: str = "fluid"
    options: Mapping[str, Any] = field(default_factory=dict)
    explain: bool = False
    sharing: str = CACHED

    def __post_init__(self) -> None:
        """Refuse what no planner takes before anything is opened."""
        check_planner(self.planner, self.options)


def plan_and_save(project: Project, request: PlanRequest) -> Plan:
    """Make a plan and keep it in the catalog."""
    with project.writing() as catalog:
        plan = make_plan(catalog, request)
        catalog.save_ensemble(request.ensemble)
        catalog.save_site(request.site)
        catalog.save_plan(request.ensemble.name, request.site.name, plan, time.time())
    return plan


def make_plan(catalog: Catalog, request: PlanRequest, progress: Mapping[str, Progress] | None = None) -> Plan:
    """Make a plan from what the catalog has.

    Raises
    ------
    BadInputError
        If a member has no profile, the planner or an option is unknown, or the planner's members cannot
        share as they are to.
    InfeasibleError
        If the site, the wall-clock limit or a member's `max_gpus` leave no plan.
    """
    site, size = request.site, request.size
    profiles = {p.member: p for p in member_profiles(catalog, request.ensemble, site)}
    _refuse_too_large(request.ensemble, site)
    members = candidates(request.ensemble, profiles, progress or {}, size.gpus, site.gpus_per_node)
    cluster = Cluster.at(site, size.gpus)
    clock = Clock(size.wall_s, size.grace_s, ROUND_OVERHEAD_S, JOB_OVERHEAD_S)
    options = options_from(request.options)
    arrivals = [Arrival(member) for member in members]
    world = World(cluster, clock, lockstep=request.sharing == LOCKSTEP)
    choice = chosen(request.planner, arrivals, world, options)
    if world.lockstep and not choice.planner.shares:
        raise BadInputError(
            f"planner {choice.planner.name} forms no flotillas, whose members could train in lockstep",
            "choose --planner flotilla, flotilla-local or homogeneous, or --sharing cached",
        )
    plan = forecast(choice.planner, members, world, options, explain=request.explain)
    return replace(plan, why=choice.why)


def check_planner(name: str, options: Mapping[str, Any]) -> None:
    """Raise BadInputError if there is no such planner, or an option is wrong."""
    if name != AUTO:
        planner_named(name)
    options_from(options)


def chosen(name: str, arrivals: Sequence[Arrival], world: World, options: Options) -> Choice:
    """Return the planner of that name, or for ``auto`` the one that does best."""
    return choose(arrivals, world, options) if name == AUTO else Choice(planner_named(name))


def member_profiles(catalog: Catalog, ensemble: Ensemble, site: Site) -> tuple[MemberProfile, ...]:
    """Return the profiles of the members as they are now; points of other batch sizes do not count."""
    return profiles_at(catalog, ensemble, site.name)


def profiles_at(catalog: Catalog, ensemble: Ensemble, site: str) -> tuple[MemberProfile, ...]:
    """Return the profiles at the site of that name."""
    points = catalog.points(ensemble.name, site)
    by_member = {member.name: current_points(points, ensemble, member.name) for member in ensemble.members}
    return tuple(_profile(name, own) for name, own in by_member.items() if own)


def current_points(points: Iterable[ProfilePoint], ensemble: Ensemble, member: str) -> list[ProfilePoint]:
    """Return a member's points that were measured with its present network and batch size."""
    fingerprint = ensemble.member(member).fingerprint
    return [p for p in points if p.member == member and p.fingerprint == fingerprint]


def stale_points(points: Iterable[ProfilePoint], ensemble: Ensemble) -> set[tuple[str, int]]:
    """Return (member, GPUs) of points whose member has changed, or that other software measured."""
    points = list(points)
    newest = max(points, key=lambda point: point.measured_at, default=None)
    current = {member.name: member.fingerprint for member in ensemble.members}
    return {
        (point.member, point.gpus)
        for point in points
        if newest is not None
        and (point.machine != newest.machine or current.get(point.member) != point.fingerprint)
    }


def warnings_of(project: Project, ensemble: Ensemble, site: Site) -> list[str]:
    """Say what is doubtful about the profile that a plan would be made from."""
    with project.reading() as catalog:
        points = [
            point
            for member in ensemble.members
            for point in current_points(catalog.points(ensemble.name, site.name), ensemble, member.name)
        ]
    old = {point.member for point in points if time.time() - point.measured_at > OLD_S}
    mixed = {member for member, _ in stale_points(points, ensemble)}
    reasons = {
        "was measured with other hardware or software than the rest": mixed,
        f"is older than {OLD_S // DAY_S} days": old,
    }
    return [
        f"the profile of {', '.join(sorted(members))} {reason}; `hetctl profile --force` measures it again"
        for reason, members in reasons.items()
        if members
    ]


def _profile(member: str, points: list[ProfilePoint]) -> MemberProfile:
    last = max(points, key=lambda point: point.measured_at)
    by_type = {p.machine.gpu_type: _newest(points, p.machine.gpu_type) for p in points}
    newest = by_type[last.machine.gpu_type]
    used = list(newest.values())
    rates_by_type = {
        gpu_type: {gpus: here[gpus].rate for gpus in sorted(here)} for gpu_type, here in by_type.items()
    }
    return MemberProfile(
        member=member,
        rates={gpus: newest[gpus].rate for gpus in sorted(newest)},
        samples=next((p.samples for p in used if p.samples is not None), None),
        samples_per_epoch=last.samples_per_epoch,
        startup_s=_mean(p.startup_s for p in used),
        evaluate_s=_mean(p.evaluate_s for p in used),
        checkpoint_s=_mean(p.checkpoint_s for p in used if p.gpus == min(newest)),
        peak_memory_bytes=max(p.peak_memory_bytes for p in used),
        gpu_type=last.machine.gpu_type,
        rates_by_type=rates_by_type if len(rates_by_type) > 1 else {},
    )


def _newest(points: Iterable[ProfilePoint], gpu_type: str) -> dict[int, ProfilePoint]:
    here = [point for point in points if point.machine.gpu_type == gpu_type]
    return {point.gpus: point for point in sorted(here, key=lambda point: point.measured_at)}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _refuse_too_large(ensemble: Ensemble, site: Site) -> None:
    for member in ensemble.members:
        if member.max_gpus is not None and member.max_gpus > site.gpus:
            raise InfeasibleError(
                f"max_gpus of {member.name} is {member.max_gpus}; site {site.name} has only {site.gpus}",
                "lower it in the ensemble file",
            )
