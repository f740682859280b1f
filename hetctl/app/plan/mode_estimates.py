"""Phases of a plan, and simulated times of the other modes that their members could use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hetctl.app.hopper import MOST_TIMES
from hetctl.app.pipeline.members import MemberLayers, PipelineMember
from hetctl.app.plan.plan_context import PlanContext
from hetctl.methods.hopper import SearchOptions
from hetctl.methods.phase_costs import PhaseRun, evaluation_times, hop_phase, pipeline_phase, unit_times
from hetctl.methods.pipeline.layouts import PlacedPipeline, allocation_of
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.plan import BALANCED, DATA_PARALLEL, HOPPER, PIPELINE, Allocation, Plan, Round
from hetctl.model.serialization import encode
from hetctl.model.training_settings import OFF
from hetctl.model.workload import Workload


@dataclass(frozen=True)
class PhaseDraft:
    """A phase without its start time.

    Parameters
    ----------
    makespans_s : mapping of str to float
        Simulated times by mode, as in `Phase`.
    rounds : tuple of Round
        Its rounds, with times from the start of the phase; empty for hops.
    plan : Plan or None
        Plan of a data-parallel phase.
    """

    mode: str
    run: PhaseRun
    makespans_s: Mapping[str, float]
    rounds: tuple[Round, ...] = ()
    plan: Plan | None = None


def pipeline_member_of(context: PlanContext, name: str, layers: MemberLayers) -> PipelineMember:
    """Return a member as a pipeline.

    Raises
    ------
    BadInputError
        If the number of samples in an epoch is unknown, or the member has a global batch size.
    """
    member = context.ensemble.member(name)
    if member.global_batch_size is not None:
        raise BadInputError(
            f"{name} has global_batch_size {member.global_batch_size}, and would train as a pipeline, which"
            " makes a step of each batch of a virtual worker",
            "give it a batch_size alone, or plan with --mode data-parallel",
        )
    known = [
        context.ensemble.samples_per_epoch,
        *(profile.samples_per_epoch for profile in context.profiles.values()),
        *(point.samples_per_epoch for points in context.layers.values() for point in points),
    ]
    samples_per_epoch = next((samples for samples in known if samples), None)
    if samples_per_epoch is None:
        raise BadInputError(
            f"the number of samples in an epoch of {name} is unknown",
            "set samples_per_epoch in the ensemble file, or run hetctl profile for a member that fits a GPU",
        )
    return PipelineMember(member, layers, samples_per_epoch, context.profiles.get(name))


def pipelines(context: PlanContext, pipelined: Sequence[PipelineMember]) -> PhaseDraft:
    """Return the phase of members that train as pipelines, one after another, each on all its GPUs."""
    found = _laid_out(context, pipelined)
    seconds = {each.member.name: each.seconds(found[each.member.name].rate) for each in pipelined}
    run = pipeline_phase(seconds, context.scenario.timing)
    starts_s = [0.0, *run.done_s.values()]
    rounds = tuple(
        Round(index, seconds[name], (allocation_of(name, laid_out),), start_s)
        for index, ((name, laid_out), start_s) in enumerate(zip(found.items(), starts_s, strict=False))
    )
    return PhaseDraft(PIPELINE, run, {PIPELINE: run.seconds}, rounds)


def _laid_out(context: PlanContext, pipelined: Sequence[PipelineMember]) -> dict[str, PlacedPipeline]:
    """Return the pipeline of each member; equal ones, as of trials of one shape, are planned once."""
    cluster = context.scenario.cluster
    problems = {each.member.name: each.problem(context.site, cluster, context.options) for each in pipelined}
    texts = {name: json.dumps(encode(problem), sort_keys=True) for name, problem in problems.items()}
    seconds = context.options.solver_time_limit_s / len(set(texts.values()))
    found: dict[str, PlacedPipeline] = {}
    for each in pipelined:
        name = each.member.name
        if texts[name] not in found:
            found[texts[name]] = each.laid_out(replace(problems[name], search_s=seconds), cluster)
    return {name: found[text] for name, text in texts.items()}


def hops(context: PlanContext, hopping: Sequence[Workload]) -> PhaseDraft:
    """Return the phase of members that hop, with the data-parallel time for comparison."""
    run = _hop_run(context, hopping)
    makespans_s = {HOPPER: run.seconds}
    with suppress(InfeasibleError):
        makespans_s.update(_makespans(_data_parallel_plans(context, hopping)))
    return PhaseDraft(HOPPER, run, makespans_s)


def _hop_run(context: PlanContext, members: Sequence[Workload]) -> PhaseRun:
    cluster, options = context.scenario.cluster, context.options
    if wide := next((member for member in members if member.min_gpus > 1), None):
        raise InfeasibleError(
            f"{wide.name} trains on no fewer than {wide.min_gpus} GPUs, and a member that hops on one, or on"
            " more only while there are fewer members than GPUs",
            "lower min_gpus of it, or plan with --mode data-parallel",
        )
    if len(members) * context.partitions * context.gpus > MOST_TIMES:
        raise InfeasibleError(
            f"{len(members):,} members times {context.partitions:,} partitions times {context.gpus:,} GPUs"
            f" are more than {MOST_TIMES:,} unit times",
            "lower `partitions`, or plan with --mode data-parallel",
        )
    train, evaluate = (
        times(members, context.partitions, cluster, context.homes) for times in (unit_times, evaluation_times)
    )
    search = SearchOptions(seed=options.seed, seconds=options.solver_time_limit_s)
    return hop_phase(members, train, evaluate, context.scenario.timing, search, options.hop_scheduler)


def data_parallel(
    context: PlanContext, rest: Sequence[Workload], layers: Mapping[str, MemberLayers]
) -> PhaseDraft:
    """Return the data-parallel phase, with equal batches or, if faster, balanced ones."""
    plans = _data_parallel_plans(context, rest)
    mode = min(plans, key=lambda name: plans[name].predicted_makespan_s)
    plan = plans[mode]
    run = PhaseRun(
        plan.predicted_makespan_s,
        {forecast.member: forecast.done_s for forecast in plan.members},
        {forecast.member: forecast.training_s for forecast in plan.members},
    )
    makespans_s = {**_makespans(plans), **_other_makespans(context, rest, layers)}
    return PhaseDraft(mode, run, makespans_s, _balanced(context, plan.rounds, rest), plan)


def _data_parallel_plans(context: PlanContext, members: Sequence[Workload]) -> dict[str, Plan]:
    plans = {DATA_PARALLEL: context.data_parallel(members, context.options)}
    if context.options.balance != OFF and _may_be_balanced(context, members):
        balanced = replace(context.options, mix_types=True)
        plans[BALANCED] = context.data_parallel(members, balanced)
    return plans


def _makespans(plans: Mapping[str, Plan]) -> dict[str, float]:
    return {mode: plan.predicted_makespan_s for mode, plan in plans.items()}


def _may_be_balanced(context: PlanContext, rest: Sequence[Workload]) -> bool:
    """Return true if there are GPUs of several types, and all members were measured on each."""
    types = {node.gpu_type or "" for node in context.scenario.cluster.nodes}
    return len(types) > 1 and all(types <= set(member.rates_by_type) for member in rest)


def _balanced(
    context: PlanContext, rounds: Iterable[Round], members: Iterable[Workload]
) -> tuple[Round, ...]:
    """Return rounds with batches for members that have GPUs of several types."""
    gpu_types = {node.name: node.gpu_type or "" for node in context.scenario.cluster.nodes}
    if len(set(gpu_types.values())) < 2:
        return tuple(rounds)
    # Imported here since batches differ only between types of GPU.
    from hetctl.methods.balance.cpu_manager import first_batches

    by_name = {member.name: member for member in members}
    chunk_of = {member.name: member.chunk for member in context.ensemble.members}

    def with_batches(given: Allocation) -> Allocation:
        workload, chunk = by_name[given.member], chunk_of[given.member](given.gpus)
        batches = first_batches(given, chunk, gpu_types, lambda t: workload.on_type(t).rates[given.gpus])
        return replace(given, batch_sizes=batches)

    return tuple(
        replace(planned, allocations=tuple(map(with_batches, planned.allocations))) for planned in rounds
    )


def _other_makespans(
    context: PlanContext, rest: Sequence[Workload], layers: Mapping[str, MemberLayers]
) -> dict[str, float]:
    """Return the simulated times of the other modes, as far as they are possible for the members."""
    makespans_s = {}
    if context.partitions:
        with suppress(InfeasibleError):
            makespans_s[HOPPER] = _hop_run(context, rest).seconds
    if all(member.name in layers for member in rest):
        with suppress(BadInputError, InfeasibleError):
            pipelined = [pipeline_member_of(context, member.name, layers[member.name]) for member in rest]
            makespans_s[PIPELINE] = pipelines(context, pipelined).run.seconds
    return makespans_s
