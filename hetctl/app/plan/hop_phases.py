"""Phases in which members hop, and plans of one such phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from hetctl.app.hopper import MOST_TIMES
from hetctl.app.plan.phase_drafts import PhaseDraft, assembled, data_parallel_plans, makespans
from hetctl.app.plan.planning import PlanRequest, demands_of, limits_of
from hetctl.methods.hop_phase import hop_phase, size_of_groups, unit_times
from hetctl.methods.hopper import SearchOptions
from hetctl.methods.parallelism import PhaseRun, does_not_fit, too_large
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.plan import HOPPER, ModeChoice, Plan
from hetctl.model.workload import Workload
from hetctl.perf.bounds import fluid_bound


def plan_hopper(request: PlanRequest) -> Plan:
    """Plan one phase, in which all members hop to their end.

    Raises
    ------
    BadInputError
        If a node would have no partition, or the scheduler does not support the job's workers.
    InfeasibleError
        If a member does not fit a GPU, or a job is too short for a visit to a partition.
    """
    refuse_bare_nodes(request)
    room = limits_of(request)
    for demand in demands_of(request, {}):
        if too_large(demand, room):
            raise InfeasibleError(
                does_not_fit(demand.member, demand, room),
                "lower its batch_size, use GPUs with more memory, or plan with --mode auto",
            )
    members = request.workloads()
    # This comes before the size of groups: members that no worker can train have none.
    phases = [hops(request, members)] if members else []
    reason = (
        f"the mode was given: {_together(request, members)}, and hops over {request.partitions} partitions"
    )
    guess = "; no rate of it is known yet, and visits count as equally long until the first have ended"
    choices = tuple(ModeChoice(m.name, HOPPER, reason + guess * m.is_guess) for m in members)
    return assembled(request, phases, choices, fluid_bound(members, request.gpus))


def _together(request: PlanRequest, members: Sequence[Workload]) -> str:
    """Return a clause on the GPUs that train each of the members that hop."""
    cluster = request.scenario.cluster
    if not 0 < len(members) < request.gpus:
        return "each trains on one GPU"
    size = size_of_groups(members, request.partitions, cluster, request.homes)
    if size > 1:
        return f"each trains on {size} GPUs of a node together"
    if cluster.gpus_per_node == 1:
        return "each trains on one GPU, as groups are formed within a node"
    return "each trains on one GPU, as groups would not be faster"


def refuse_bare_nodes(request: PlanRequest) -> None:
    """Raise BadInputError if the data is partitioned, and some nodes of a job would have no partition."""
    nodes, partitions = len(request.scenario.cluster.nodes), request.partitions
    if 0 < partitions < nodes:
        raise BadInputError(
            f"ensemble {request.ensemble.name} has {partitions} partitions, but a job has {nodes} nodes:"
            " some would have no data",
            "raise partitions in the ensemble file, or lower --gpus",
        )
    bare = sum(not numbers for numbers in request.homes.values())
    if bare:
        raise BadInputError(
            f"{bare} of the {nodes} nodes of a job would have no data, by the file of partitions of"
            f" {request.ensemble.name}",
            "give them partitions there, leave `nodes` empty where it is unknown, or lower --gpus",
        )


def hops(request: PlanRequest, hopping: Sequence[Workload]) -> PhaseDraft:
    """Return the phase of members that hop, with the data-parallel time for comparison."""
    run = hop_run(request, hopping)
    makespans_s = {HOPPER: run.seconds}
    with suppress(InfeasibleError):
        makespans_s.update(makespans(data_parallel_plans(request, hopping)))
    return PhaseDraft(HOPPER, run, makespans_s)


def hop_run(request: PlanRequest, members: Sequence[Workload]) -> PhaseRun:
    """Return the simulated times of members that hop; InfeasibleError if they cannot."""
    cluster, options = request.scenario.cluster, request.planner_options
    if wide := next((member for member in members if member.min_gpus > 1), None):
        raise InfeasibleError(
            f"{wide.name} trains on no fewer than {wide.min_gpus} GPUs, and a member that hops on one, or on"
            " more only while there are fewer members than GPUs",
            "lower min_gpus of it, or plan with --mode data-parallel",
        )
    if len(members) * request.partitions * request.gpus > MOST_TIMES:
        raise InfeasibleError(
            f"{len(members):,} members times {request.partitions:,} partitions times {request.gpus:,} GPUs"
            f" are more than {MOST_TIMES:,} unit times",
            "lower `partitions`, or plan with --mode data-parallel",
        )
    train, evaluate = (
        unit_times(members, request.partitions, cluster, request.homes, evaluates=evaluates)
        for evaluates in (False, True)
    )
    search = SearchOptions(seed=options.seed, seconds=options.solver_time_limit_s)
    timing = request.scenario.timing
    if any(member.is_guess for member in members):
        # A visit may take far less time than is expected, so that no job is known to be too short.
        timing = replace(timing, wall_s=math.inf)
    return hop_phase(members, train, evaluate, timing, search, options.hop_scheduler).stretched(request.waits)
