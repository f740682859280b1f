"""Plan in several modes: a suitable mode for each network, and simulated times of each phase."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from hetctl.app.pipeline.members import MemberLayers, layers_of, memory_in
from hetctl.app.plan.mode_estimates import PhaseDraft, data_parallel, hops, pipeline_member_of, pipelines
from hetctl.app.plan.plan_context import PlanContext
from hetctl.methods.parallelism import (
    Demand,
    HopChoice,
    ModeLimits,
    choose_modes,
    does_not_fit,
    hopper_epochs,
    too_large,
)
from hetctl.methods.phase_costs import size_of_groups
from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.plan import HOPPER, PIPELINE, Forecast, ModeChoice, Phase, Plan
from hetctl.model.training_progress import Progress
from hetctl.model.workload import Workload
from hetctl.perf.bounds import fluid_bound
from hetctl.perf.epoch_timeline import EpochTimeline
from hetctl.perf.workloads import active_workloads


def plan_modes(context: PlanContext) -> Plan:
    """Choose a mode for each member, and plan one phase after the other: pipelines, hops, data-parallel.

    Raises
    ------
    BadInputError
        If a member has no profile, a layer profile is wrong, or the site does not give its links.
    InfeasibleError
        If a member fits neither a GPU nor a pipeline, or a job is too short for any progress.
    """
    _refuse_bare_nodes(context)
    layers = _layers(context)
    room = _room(context)
    demands = _demands(context, layers)
    refuse_large_parts(context.ensemble, demands, room)
    large = [demand.member for demand in demands if too_large(demand, room)]
    _refuse_without_layers([demand for demand in demands if demand.member in large], layers, room)
    members = _candidates(context, without=large)
    epochs = _epochs(members)
    drafts = _drafts(context, members, layers)
    chosen = HopChoice({most: _seconds(context, phases) for most, phases in drafts.items()})
    choices = choose_modes([replace(d, epochs=epochs.get(d.member, 0)) for d in demands], room, chosen)
    pipelined = [pipeline_member_of(context, name, layers[name]) for name in large]
    phases = [*([pipelines(context, pipelined)] if pipelined else []), *drafts.get(chosen.epochs, [])]
    bound_s = fluid_bound([*members, *(each.ideal(context.gpus) for each in pipelined)], context.gpus)
    return _assembled(context, phases, choices, bound_s)


def plan_hopper(context: PlanContext) -> Plan:
    """Plan one phase, in which all members hop to their end.

    Raises
    ------
    BadInputError
        If a node would have no partition, a member has no profile, or the scheduler does not support the
        job's workers.
    InfeasibleError
        If a member does not fit a GPU, or a job is too short for a visit to a partition.
    """
    _refuse_bare_nodes(context)
    room = _room(context)
    for demand in _demands(context, {}):
        if too_large(demand, room):
            raise InfeasibleError(
                does_not_fit(demand.member, demand, room),
                "lower its batch_size, use GPUs with more memory, or plan with --mode auto",
            )
    members = _candidates(context, without=())
    reason = (
        f"the mode was given: {_together(context, members)}, and hops over {context.partitions} partitions"
    )
    choices = tuple(ModeChoice(member.name, HOPPER, reason) for member in members)
    phases = [hops(context, members)] if members else []
    return _assembled(context, phases, choices, fluid_bound(members, context.gpus))


def plan_pipelined(context: PlanContext) -> Plan:
    """Plan one phase, in which all members train as pipelines, one after another.

    Raises
    ------
    BadInputError
        If the layers of a member are unknown, or the site does not give its links or memory.
    InfeasibleError
        If the GPUs have no room for a member.
    """
    layers = _layers(context)
    for member in context.ensemble.members:
        if member.name not in layers:
            raise BadInputError(
                f"the layers of {member.name} are unknown, so that it cannot be cut into stages",
                f"run `hetctl profile --layers {member.name}`, or give `layers` in the ensemble file",
            )
    unfinished = [
        member.name
        for member in context.ensemble.members
        if context.progress.get(member.name, Progress(member.name)).active
    ]
    pipelined = [pipeline_member_of(context, name, layers[name]) for name in unfinished]
    reason = "the mode was given: its layers go to several GPUs"
    choices = tuple(ModeChoice(name, PIPELINE, reason) for name in unfinished)
    phases = [pipelines(context, pipelined)] if pipelined else []
    bound_s = fluid_bound([each.ideal(context.gpus) for each in pipelined], context.gpus)
    return _assembled(context, phases, choices, bound_s)


def _together(context: PlanContext, members: Sequence[Workload]) -> str:
    """Return a clause on the GPUs that train each of the members that hop."""
    cluster = context.scenario.cluster
    if not 0 < len(members) < context.gpus:
        return "each trains on one GPU"
    size = size_of_groups(members, context.partitions, cluster, context.homes)
    if size > 1:
        return f"each trains on {size} GPUs of a node together"
    if cluster.gpus_per_node == 1:
        return "each trains on one GPU, as groups are formed within a node"
    return "each trains on one GPU, as groups would not be faster"


def _refuse_bare_nodes(context: PlanContext) -> None:
    nodes, partitions = len(context.scenario.cluster.nodes), context.partitions
    if 0 < partitions < nodes:
        raise BadInputError(
            f"ensemble {context.ensemble.name} has {partitions} partitions, but a job has {nodes} nodes:"
            " some would have no data",
            "raise partitions in the ensemble file, or lower --gpus",
        )
    bare = sum(not numbers for numbers in context.homes.values())
    if bare:
        raise BadInputError(
            f"{bare} of the {nodes} nodes of a job would have no data, by the file of partitions of"
            f" {context.ensemble.name}",
            "give them partitions there, leave `nodes` empty where it is unknown, or lower --gpus",
        )


def _layers(context: PlanContext) -> dict[str, MemberLayers]:
    """Return the layers of the members that name a layer profile, or whose layers were measured."""
    found = {
        member.name: layers_of(
            member, context.site, context.scenario.cluster, context.layers.get(member.name, ())
        )
        for member in context.ensemble.members
        # A network is divided by one of both.
        if not member.shard
    }
    return {name: layers for name, layers in found.items() if layers is not None}


def _room(context: PlanContext) -> ModeLimits:
    memory = memory_in(context.site, context.scenario.cluster)
    # An unknown memory counts as the smallest: nothing is then known to be too large for it.
    smallest = min(memory, key=lambda gpu_type: memory[gpu_type] or 0)
    return ModeLimits(
        gpus=context.gpus,
        gpu=f"a {smallest or context.site.device} of {context.site.name}",
        memory_bytes=memory[smallest],
        partitions=context.partitions,
    )


def _demands(context: PlanContext, layers: Mapping[str, MemberLayers]) -> list[Demand]:
    """Return the memory that each member needs of a GPU: measured, or else the sum over its layers."""
    measured = {name: profile.peak_memory_bytes for name, profile in context.profiles.items()}
    summed = {name: own.needed_bytes for name, own in layers.items()}
    return [
        Demand(
            member.name,
            demand_in_parts(member, measured.get(member.name) or summed.get(member.name), context.gpus),
        )
        for member in context.ensemble.members
    ]


def _refuse_without_layers(large: Iterable[Demand], layers: Collection[str], room: ModeLimits) -> None:
    for demand in large:
        if demand.member not in layers:
            raise InfeasibleError(
                does_not_fit(demand.member, demand, room),
                f"measure its layers on each type of GPU (`hetctl profile --layers {demand.member}`), give a"
                " profile of them (`layers` in the ensemble file), lower its batch_size, or use GPUs with"
                " more memory",
            )


def _candidates(context: PlanContext, without: Collection[str]) -> tuple[Workload, ...]:
    """Return the workloads of the members that fit one GPU."""
    ensemble = context.ensemble
    fitting = replace(ensemble, members=tuple(m for m in ensemble.members if m.name not in without))
    return active_workloads(
        fitting, context.profiles, context.progress, context.gpus, context.site.gpus_per_node
    )


def _epochs(members: Iterable[Workload]) -> dict[str, int]:
    return {member.name: EpochTimeline(member, 1.0).count for member in members}


def _drafts(
    context: PlanContext, members: Sequence[Workload], layers: Mapping[str, MemberLayers]
) -> dict[int, list[PhaseDraft]]:
    """Return the alternatives for members that fit a GPU, by epochs of hopping before data-parallel training.

    None hops; all hop while there are enough configurations; or, if that is cheaper still, to their end.

    Raises
    ------
    InfeasibleError
        If no alternative has a plan: the reason that data-parallel training has none.
    """
    if not members:
        return {}
    drafts: dict[int, list[PhaseDraft]] = {}
    refusal = None
    try:
        drafts[0] = [data_parallel(context, members, layers)]
    except InfeasibleError as error:
        refusal = error
    for most in _hop_epochs(context, members, drafts):
        with suppress(InfeasibleError):
            hopping, rest = _split(members, most)
            parallel = [data_parallel(context, rest, layers)] if rest else []
            drafts[most] = [hops(context, hopping), *parallel]
    if refusal and not drafts:
        raise refusal
    return drafts


def _hop_epochs(
    context: PlanContext, members: Sequence[Workload], drafts: Mapping[int, Sequence[PhaseDraft]]
) -> list[int]:
    """Return the epochs of hopping that are worth a simulation."""
    if not context.partitions:
        return []
    epochs = list(_epochs(members).values())
    enough, longest = hopper_epochs(epochs, context.gpus), max(epochs)
    draft = drafts[0][0] if drafts else None
    to_their_end = draft is None or draft.makespans_s.get(HOPPER, math.inf) < draft.run.seconds
    return [most for most in dict.fromkeys((enough, longest)) if most and (most == enough or to_their_end)]


def _seconds(context: PlanContext, phases: Sequence[PhaseDraft]) -> float:
    """Return the length of phases that follow one another."""
    overhead_s = context.scenario.timing.job_overhead_s * (len(phases) - 1)
    return sum(phase.run.seconds for phase in phases) + overhead_s


def _split(members: Sequence[Workload], most: int) -> tuple[list[Workload], list[Workload]]:
    """Return the work of the first epochs, for hops, and the work left after that."""
    epochs = _epochs(members)
    hopping, rest = [], []
    for member in members:
        later = float(max(epochs[member.name] - most, 0) * (member.samples_per_epoch or 0))
        if member.samples_left > later:
            hopping.append(replace(member, samples_left=member.samples_left - later))
        if later:
            rest.append(replace(member, samples_left=later))
    return hopping, rest


def _assembled(
    context: PlanContext, phases: Sequence[PhaseDraft], choices: tuple[ModeChoice, ...], lower_bound_s: float
) -> Plan:
    """Return the plan in which each phase begins at the end of the previous one."""
    starts_s = [0.0]
    for phase in phases:
        starts_s.append(starts_s[-1] + phase.run.seconds + context.scenario.timing.job_overhead_s)
    makespan_s = starts_s[-1] - context.scenario.timing.job_overhead_s if phases else 0.0
    begun = list(zip(phases, starts_s, strict=False))
    rounds = [
        replace(planned, start_s=planned.start_s + start_s)
        for phase, start_s in begun
        for planned in phase.rounds
    ]
    last = next((phase.plan for phase in phases if phase.plan), None)
    return Plan(
        planner=last.planner if last else context.planner,
        objective=context.options.objective,
        gpus=context.gpus,
        gpus_per_node=context.scenario.cluster.gpus_per_node,
        predicted_makespan_s=makespan_s,
        lower_bound_s=lower_bound_s,
        ratio=makespan_s / lower_bound_s if lower_bound_s else 1.0,
        rounds=tuple(replace(planned, index=index) for index, planned in enumerate(rounds)),
        members=_forecasts(context.ensemble, begun),
        options=asdict(context.options),
        reason=last.reason if last else "",
        choices=choices,
        phases=tuple(
            Phase(phase.mode, tuple(phase.run.done_s), start_s, phase.run.seconds, phase.makespans_s)
            for phase, start_s in begun
        ),
        balance_gains={
            name: gain for phase in phases if phase.plan for name, gain in phase.plan.balance_gains.items()
        },
    )


def _forecasts(ensemble: Ensemble, begun: Sequence[tuple[PhaseDraft, float]]) -> tuple[Forecast, ...]:
    """Return each member's end in the last of its phases, and its total training time."""
    done_s = {name: start_s + end_s for phase, start_s in begun for name, end_s in phase.run.done_s.items()}
    training_s = {name: sum(phase.run.training_s.get(name, 0.0) for phase, _ in begun) for name in done_s}
    names = (member.name for member in ensemble.members)
    return tuple(Forecast(name, done_s[name], training_s[name]) for name in names if name in done_s)


def demand_in_parts(member: Member, memory_bytes: int | None, gpus: int) -> int | None:
    """Return the least memory of a rank of a member that needs so much on its least number of GPUs.

    For divided members, a lower bound: activations are as large on any number of GPUs.
    """
    if memory_bytes is None or not member.shard:
        return memory_bytes
    return memory_bytes * member.min_gpus // max(member.min_gpus, member.most_gpus(gpus))


def refuse_large_parts(ensemble: Ensemble, demands: Sequence[Demand], room: ModeLimits) -> None:
    """Raise InfeasibleError for a divided member of which even the least part is too large."""
    for demand in demands:
        if ensemble.member(demand.member).shard and too_large(demand, room):
            raise InfeasibleError(
                does_not_fit(f"a part of {demand.member} on each of its GPUs", demand, room),
                "raise its max_gpus, lower its batch_size, or use GPUs with more memory",
            )
