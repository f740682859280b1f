"""Phases in which members train as pipelines, and plans of one such phase."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from hetctl.app.pipeline.members import MemberLayers, PipelineMember, layers_of
from hetctl.app.plan.phase_drafts import PhaseDraft, assembled
from hetctl.app.plan.plan_request import PlanRequest
from hetctl.methods.phase_run import phase_in_turn
from hetctl.methods.pipeline.layouts import PlacedPipeline, allocation_of
from hetctl.model.errors import BadInputError
from hetctl.model.plan import PIPELINE, ModeChoice, Plan, Round
from hetctl.model.serialization import encode
from hetctl.model.training_progress import Progress
from hetctl.perf.bounds import fluid_bound


def plan_pipelined(request: PlanRequest) -> Plan:
    """Plan one phase, in which all members train as pipelines, one after another.

    Raises
    ------
    BadInputError
        If the layers of a member are unknown, or the site does not give its links or memory.
    InfeasibleError
        If the GPUs have no room for a member.
    """
    layers = known_layers(request)
    for member in request.ensemble.members:
        if member.name not in layers:
            raise BadInputError(
                f"the layers of {member.name} are unknown, so that it cannot be cut into stages",
                f"run `hetctl profile --layers {member.name}`, or give `layers` in the ensemble file",
            )
    unfinished = [
        member.name
        for member in request.ensemble.members
        if request.progress.get(member.name, Progress(member.name)).active
    ]
    pipelined = [pipeline_member_of(request, name, layers[name]) for name in unfinished]
    reason = "the mode was given: its layers go to several GPUs"
    choices = tuple(ModeChoice(name, PIPELINE, reason) for name in unfinished)
    phases = [pipelines(request, pipelined)] if pipelined else []
    bound_s = fluid_bound([each.ideal(request.gpus) for each in pipelined], request.gpus)
    return assembled(request, phases, choices, bound_s)


def known_layers(request: PlanRequest) -> dict[str, MemberLayers]:
    """Return the layers of the members that name a layer profile, or whose layers were measured."""
    found = {
        member.name: layers_of(
            member, request.site, request.scenario.cluster, request.layers.get(member.name, ())
        )
        for member in request.ensemble.members
        # A network is divided by one of both.
        if not member.shard
    }
    return {name: layers for name, layers in found.items() if layers is not None}


def pipeline_member_of(request: PlanRequest, name: str, layers: MemberLayers) -> PipelineMember:
    """Return a member as a pipeline.

    Raises
    ------
    BadInputError
        If the number of samples in an epoch is unknown, or the member has a global batch size.
    """
    member = request.ensemble.member(name)
    if member.global_batch_size is not None:
        raise BadInputError(
            f"{name} has global_batch_size {member.global_batch_size}, and would train as a pipeline, which"
            " makes a step of each batch of a virtual worker",
            "give it a batch_size alone, or plan with --mode data-parallel",
        )
    known = [
        request.ensemble.samples_per_epoch,
        *(profile.samples_per_epoch for profile in request.profiles.values()),
        *(point.samples_per_epoch for points in request.layers.values() for point in points),
    ]
    samples_per_epoch = next((samples for samples in known if samples), None)
    if samples_per_epoch is None:
        raise BadInputError(
            f"the number of samples in an epoch of {name} is unknown",
            "set samples_per_epoch in the ensemble file, or run hetctl profile for a member that fits a GPU",
        )
    return PipelineMember(member, layers, samples_per_epoch, request.profiles.get(name))


def pipelines(request: PlanRequest, pipelined: Sequence[PipelineMember]) -> PhaseDraft:
    """Return the phase of members that train as pipelines, one after another, each on all its GPUs."""
    found = _laid_out(request, pipelined)
    seconds = {each.member.name: each.seconds(found[each.member.name].rate) for each in pipelined}
    run = phase_in_turn(seconds, request.scenario.timing)
    starts_s = [0.0, *run.done_s.values()]
    rounds = tuple(
        Round(index, seconds[name], (allocation_of(name, laid_out),), start_s)
        for index, ((name, laid_out), start_s) in enumerate(zip(found.items(), starts_s, strict=False))
    )
    return PhaseDraft(PIPELINE, run, {PIPELINE: run.seconds}, rounds)


def _laid_out(request: PlanRequest, pipelined: Sequence[PipelineMember]) -> dict[str, PlacedPipeline]:
    """Return the pipeline of each member; equal ones, as of trials of one shape, are planned once."""
    cluster, options = request.scenario.cluster, request.planner_options
    problems = {each.member.name: each.problem(request.site, cluster, options) for each in pipelined}
    texts = {name: json.dumps(encode(problem), sort_keys=True) for name, problem in problems.items()}
    seconds = options.solver_time_limit_s / len(set(texts.values()))
    found: dict[str, PlacedPipeline] = {}
    for each in pipelined:
        name = each.member.name
        if texts[name] not in found:
            found[texts[name]] = each.laid_out(replace(problems[name], search_s=seconds), cluster)
    return {name: found[text] for name, text in texts.items()}
