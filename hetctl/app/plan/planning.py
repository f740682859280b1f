"""Offline planning from the profiles in the catalog."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from hetctl.app.plan.member_rules import (
    refuse_hops_by_launch,
    refuse_lockstep_of_codes,
    refuse_modes_of_commands,
    refuse_modes_of_sharded,
    refuse_sharing_of_searches,
    refuse_wide_members,
    refuse_without_hops,
)
from hetctl.app.plan.plan_request import AUTO, PlanRequest, data_parallel_plan
from hetctl.app.profile.known import (
    beyond_measured,
    current_layers,
    member_profiles,
    predictions_in,
    warnings_of,
)
from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.model.ensemble import Ensemble
from hetctl.model.plan import HOPPER, PIPELINE, Plan
from hetctl.model.profile import LayerPoint
from hetctl.model.rate_shapes import shape_digest
from hetctl.model.registry import load_entry
from hetctl.model.site import Site
from hetctl.perf.workloads import active_workloads

PLANS_BY_MODE = {
    AUTO: "hetctl.app.plan.multi_mode_plan:plan_modes",
    HOPPER: "hetctl.app.plan.hop_phases:plan_hopper",
    PIPELINE: "hetctl.app.plan.pipeline_phases:plan_pipelined",
}
"""Functions that plan in other modes than data-parallel, as ``module:function``: they import the methods."""


def with_profiles(catalog: Catalog, request: PlanRequest) -> PlanRequest:
    """Add the profiles in a catalog, and the measured layers and links where the files give none.

    Where pipelines are an option, a member that has layers but no profile is one that fits no GPU: it is
    planned by its layers.
    """
    known = member_profiles(catalog, request.ensemble, request.site, predict=request.predict_rates)
    found = {profile.member: profile for profile in known}
    if request.mode not in (AUTO, PIPELINE):
        return replace(request, profiles=found)
    measured = with_measurements(catalog, request)
    by_layers = {member.name for member in request.ensemble.members if member.layers is not None}
    by_layers.update(measured.layers)
    profiles = {name: p for name, p in found.items() if not p.predicted_from or name not in by_layers}
    return replace(measured, profiles=profiles)


def with_measurements(catalog: Catalog, request: PlanRequest) -> PlanRequest:
    """Add the measured layers and links in the catalog where the files give none."""
    # Imported here since only members that may become pipelines have layers and links.
    from hetctl.app.profile.measured_layers import links_between

    ensemble, site = request.ensemble, request.site
    layers = _by_shape(ensemble, catalog.layers(ensemble.name, site.name), site)
    links = site.links or links_between(catalog.links(site.name), site)
    return replace(request, site=replace(site, links=links), layers=layers)


def plan_and_save(project: Project, request: PlanRequest) -> Plan:
    """Make a plan and store it in the catalog.

    There may be no catalog yet if no member needs a profile, because none fits a GPU.
    """
    first = None
    if request.mode in (AUTO, PIPELINE) and not project.home.catalog.exists():
        # Planned before the catalog is created: an infeasible plan leaves no catalog behind.
        first = make_plan(request)
    with project.writing(create=first is not None) as catalog:
        plan = first or make_plan(with_profiles(catalog, request))
        catalog.save_ensemble(request.ensemble)
        catalog.save_site(request.site)
        catalog.save_plan(request.ensemble.name, request.site.name, plan, time.time())
    return plan


def make_plan(request: PlanRequest) -> Plan:
    """Make a plan, with the digest of its input; errors are those of `plan_from`."""
    return replace(plan_from(request), inputs=request.digest)


def saved_or_new_plan(catalog: Catalog, request: PlanRequest) -> Plan:
    """Return the last saved plan if it was made from the same input, or else a new one.

    The plan that was shown is submitted, even if the planner searches for a given time.
    """
    saved = catalog.latest_plan(request.ensemble.name, request.site.name)
    return saved if saved and saved.inputs == request.digest else make_plan(request)


def warnings_about(project: Project, request: PlanRequest) -> list[str]:
    """Return warnings about the profiles that a plan is made from."""
    with project.reading() as catalog:
        request = with_profiles(catalog, request)
        saved = catalog.latest_plan(request.ensemble.name, request.site.name)
    profiles = tuple(request.profiles.values())
    predicted = predictions_in(profiles)
    if saved and saved.inputs == request.digest:
        predicted += beyond_measured(saved, profiles)
    return [*warnings_of(project, request.ensemble, request.site), *predicted]


def _by_shape(ensemble: Ensemble, points: Sequence[LayerPoint], site: Site) -> dict[str, list[LayerPoint]]:
    """Return the layers of members without a file: their own, or those of another member of their shape."""
    without_file = {member.name: member for member in ensemble.members if member.layers is None}
    measured: dict[str, list[LayerPoint]] = {}
    for point in current_layers(points, ensemble, without_file, site):
        measured.setdefault(point.member, []).append(point)
    digests = {name: shape_digest(one, ensemble.rate_keys) for name, one in without_file.items()}
    of_shape = {digests[name]: own for name, own in reversed(measured.items())}
    found = {name: measured.get(name) or of_shape.get(digest, []) for name, digest in digests.items()}
    return {name: own for name, own in found.items() if own}


def plan_from(request: PlanRequest) -> Plan:
    """Make a plan from members' profiles.

    Raises
    ------
    BadInputError
        If a member has no profile, the planner or an option is unknown, the planner does not support the
        requested sharing, or members cannot hop as requested.
    InfeasibleError
        If the site, the wall-clock limit or a member's `min_gpus` permit no plan.
    """
    ensemble, site, options = request.ensemble, request.site, request.planner_options
    refuse_modes_of_commands(ensemble, request.mode, request.sharing)
    refuse_sharing_of_searches(ensemble, request.sharing)
    refuse_lockstep_of_codes(ensemble, request.sharing)
    refuse_modes_of_sharded(ensemble, request.mode, options.balance)
    if request.mode == HOPPER:
        refuse_without_hops(ensemble, site, request.sharing)
    refuse_wide_members(ensemble.members, request.scenario.cluster, mix_types=options.mix_types)
    if request.mode in PLANS_BY_MODE:
        plan: Plan = load_entry(PLANS_BY_MODE[request.mode])(request)
        if any(phase.mode == HOPPER for phase in plan.phases):
            refuse_hops_by_launch(site)
        return plan
    members = active_workloads(
        *(ensemble, request.profiles, request.progress, request.size.gpus),
        in_lockstep=request.scenario.lockstep,
    )
    return data_parallel_plan(request, members, options)
