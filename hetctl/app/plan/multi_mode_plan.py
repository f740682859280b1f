"""Plan in several modes: a suitable mode for each network, by the simulated times of the phases."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from hetctl.app.plan.hop_phases import hop_run, hops, refuse_bare_nodes
from hetctl.app.plan.phase_drafts import PhaseDraft, assembled, data_parallel
from hetctl.app.plan.pipeline_phases import MemberLayers, known_layers, pipeline_member_of, pipelines
from hetctl.app.plan.planning import PlanRequest, demands_of, limits_of, refuse_large_parts
from hetctl.methods.hopper.worker_groups import hopper_epochs
from hetctl.methods.parallelism import HopChoice, choose_modes, does_not_fit, too_large
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.plan import HOPPER, PIPELINE, Plan
from hetctl.model.workload import Workload
from hetctl.perf.bounds import fluid_bound
from hetctl.perf.epoch_timeline import EpochTimeline


def plan_modes(request: PlanRequest) -> Plan:
    """Choose a mode for each member, and plan one phase after the other: pipelines, hops, data-parallel.

    Raises
    ------
    BadInputError
        If a layer profile is wrong, or the site does not give its links.
    InfeasibleError
        If a member fits neither a GPU nor a pipeline, or a job is too short for any progress.
    """
    refuse_bare_nodes(request)
    layers = known_layers(request)
    room = limits_of(request)
    demands = demands_of(request, {name: own.needed_bytes for name, own in layers.items()})
    refuse_large_parts(request.ensemble, demands, room)
    large = [demand.member for demand in demands if too_large(demand, room)]
    for demand in demands:
        if demand.member in large and demand.member not in layers:
            raise InfeasibleError(
                does_not_fit(demand.member, demand, room),
                f"measure its layers on each type of GPU (`hetctl profile --layers {demand.member}`), give a"
                " profile of them (`layers` in the ensemble file), lower its batch_size, or use GPUs with"
                " more memory",
            )
    members = request.workloads(without=large)
    epochs = _epochs(members)
    # A guess tells of no mode that it is the fastest: members train data-parallel, which shows their rates.
    unknown = tuple(member.name for member in members if member.is_guess)
    drafts = {0: [data_parallel(request, members)]} if unknown else _drafts(request, members, layers)
    chosen = HopChoice({most: _seconds(request, phases) for most, phases in drafts.items()}, unknown)
    choices = choose_modes([replace(d, epochs=epochs.get(d.member, 0)) for d in demands], room, chosen)
    pipelined = [pipeline_member_of(request, name, layers[name]) for name in large]
    phases = [*([pipelines(request, pipelined)] if pipelined else []), *drafts.get(chosen.epochs, [])]
    bound_s = fluid_bound([*members, *(each.ideal(request.gpus) for each in pipelined)], request.gpus)
    return assembled(request, phases, choices, bound_s)


def _epochs(members: Iterable[Workload]) -> dict[str, int]:
    return {member.name: EpochTimeline(member, 1.0).count for member in members}


def _drafts(
    request: PlanRequest, members: Sequence[Workload], layers: Mapping[str, MemberLayers]
) -> dict[int, list[PhaseDraft]]:
    """Return the alternatives for members that fit a GPU, by epochs of hopping before data-parallel training.

    None hops, all hop while there are enough configurations or, if that is cheaper, all hop to their end.

    Raises
    ------
    InfeasibleError
        If no alternative has a plan; it gives the reason that data-parallel training has none.
    """
    if not members:
        return {}
    drafts: dict[int, list[PhaseDraft]] = {}
    refusal = None
    try:
        drafts[0] = [_compared(request, members, layers)]
    except InfeasibleError as error:
        refusal = error
    for most in _hop_epochs(request, members, drafts):
        with suppress(InfeasibleError):
            hopping, rest = _split(members, most)
            drafts[most] = [hops(request, hopping), *([_compared(request, rest, layers)] if rest else [])]
    if refusal and not drafts:
        raise refusal
    return drafts


def _compared(
    request: PlanRequest, rest: Sequence[Workload], layers: Mapping[str, MemberLayers]
) -> PhaseDraft:
    """Return the data-parallel phase, with the times of other possible modes."""
    draft = data_parallel(request, rest)
    makespans_s = dict(draft.makespans_s)
    if request.partitions:
        with suppress(InfeasibleError):
            makespans_s[HOPPER] = hop_run(request, rest).seconds
    if all(member.name in layers for member in rest):
        with suppress(BadInputError, InfeasibleError):
            pipelined = [pipeline_member_of(request, member.name, layers[member.name]) for member in rest]
            makespans_s[PIPELINE] = pipelines(request, pipelined).run.seconds
    return replace(draft, makespans_s=makespans_s)


def _hop_epochs(
    request: PlanRequest, members: Sequence[Workload], drafts: Mapping[int, Sequence[PhaseDraft]]
) -> list[int]:
    """Return the epochs of hopping that are worth a simulation."""
    if not request.partitions:
        return []
    epochs = list(_epochs(members).values())
    enough, longest = hopper_epochs(epochs, request.gpus), max(epochs)
    draft = drafts[0][0] if drafts else None
    to_their_end = draft is None or draft.makespans_s.get(HOPPER, math.inf) < draft.run.seconds
    return [most for most in dict.fromkeys((enough, longest)) if most and (most == enough or to_their_end)]


def _seconds(request: PlanRequest, phases: Sequence[PhaseDraft]) -> float:
    """Return the length of phases that follow one another."""
    overhead_s = request.scenario.timing.job_overhead_s * (len(phases) - 1)
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
