"""Input for the pipelines that drivers plan, and the rates by which these are scheduled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hetctl.app.pipeline.members import PipelineMember, layers_of
from hetctl.app.plan.plan_request import PlanRequest
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.plan import PIPELINE, Allocation, Plan
from hetctl.model.profile import MemberProfile
from hetctl.model.run import LOCKSTEP, RunSpec
from hetctl.model.serialization import encode
from hetctl.model.site import MEMBERS, NODES, Cluster
from hetctl.scheduling.planners.base import options_from


def with_pipelines(spec: RunSpec, plan: Plan, request: PlanRequest) -> RunSpec:
    """Add the layers, links and memory from which drivers lay out the pipelines of a plan on their nodes.

    The rate of such a member's profile becomes that of its pipeline, by which the driver schedules it.

    Raises
    ------
    BadInputError
        If the launcher, ``train_fn``, the partitions or the sharing of samples leave no room for stages.
    """
    planned = {
        allocation.member: allocation
        for each in plan.rounds
        for allocation in each.allocations
        if allocation.mode == PIPELINE
    }
    for name in planned:
        _refuse_what_has_no_stages(spec, spec.ensemble.of(spec.ensemble.member(name)))
    problems = {name: _problem(spec, request, name) for name in planned}
    profiles = {profile.member: profile for profile in spec.profiles}
    known = _samples_per_epoch(spec, request)
    for name, allocation in planned.items():
        profiles[name] = _as_pipeline(profiles.get(name, MemberProfile(name, {})), allocation, known)
    return replace(spec, pipelines=problems, profiles=tuple(profiles.values()))


def _refuse_what_has_no_stages(spec: RunSpec, ensemble: Ensemble) -> None:
    rules = (
        (
            spec.site.launch != MEMBERS,
            f"members cannot train as pipelines with --launch {MEMBERS}, which starts each in its own step",
            f"use --launch {NODES}",
        ),
        (
            ensemble.functions.train_fn is None,
            f"{ensemble.functions.train_fn} trains a whole network, but stages have parts of it",
            "leave out functions.train_fn in the ensemble file: stages train by the loss of model_fn",
        ),
        (
            ensemble.functions.evaluate_fn is None,
            f"{ensemble.functions.evaluate_fn} evaluates a whole network, but stages have parts of it",
            "leave out functions.evaluate_fn in the ensemble file: stages evaluate the metrics of model_fn",
        ),
        (
            not (ensemble.partitions and ensemble.reads_partitions),
            f"the data of {ensemble.name} is partitioned, but first stages read samples of the whole data",
            "leave out `partitions` in the ensemble file, or use another --mode",
        ),
        (
            spec.sharing != LOCKSTEP,
            f"members that train as pipelines cannot share samples in {LOCKSTEP}",
            "use --sharing cached or none",
        ),
    )
    for holds, message, hint in rules:
        if not holds:
            raise BadInputError(message, hint)


def _problem(spec: RunSpec, request: PlanRequest, name: str) -> Mapping[str, Any]:
    cluster = Cluster.at(request.site, spec.gpus)
    member = spec.ensemble.member(name)
    layers = layers_of(member, request.site, cluster, request.layers.get(name, ()))
    assert layers is not None
    pipelined = PipelineMember(member, layers, samples_per_epoch=0)
    encoded: Mapping[str, Any] = encode(pipelined.problem(request.site, cluster, options_from(spec.options)))
    return encoded


def _samples_per_epoch(spec: RunSpec, request: PlanRequest) -> int | None:
    known = [
        spec.ensemble.samples_per_epoch,
        *(profile.samples_per_epoch for profile in spec.profiles),
        *(point.samples_per_epoch for points in request.layers.values() for point in points),
    ]
    return next((samples for samples in known if samples), None)


def _as_pipeline(profile: MemberProfile, allocation: Allocation, samples: int | None) -> MemberProfile:
    """Return a profile with the rate of a pipeline on the GPUs that the plan gives it."""
    return replace(
        profile,
        rates={allocation.gpus: allocation.rate},
        rates_by_type={},
        seen_rates={},
        samples_per_epoch=profile.samples_per_epoch or samples,
    )
