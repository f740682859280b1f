"""Phases of a plan with their simulated times; data-parallel phases among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from hetctl.app.plan.planning import PlanRequest, data_parallel_plan
from hetctl.methods.parallelism import PhaseRun
from hetctl.model.ensemble import Ensemble
from hetctl.model.plan import BALANCED, DATA_PARALLEL, Allocation, Forecast, ModeChoice, Phase, Plan, Round
from hetctl.model.training_settings import OFF
from hetctl.model.values import dataclass
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


def data_parallel(request: PlanRequest, rest: Sequence[Workload]) -> PhaseDraft:
    """Return the data-parallel phase, with equal batches or, if faster, balanced ones."""
    plans = data_parallel_plans(request, rest)
    mode = min(plans, key=lambda name: plans[name].predicted_makespan_s)
    plan = plans[mode]
    run = PhaseRun(
        plan.predicted_makespan_s,
        {forecast.member: forecast.done_s for forecast in plan.members},
        {forecast.member: forecast.training_s for forecast in plan.members},
    )
    return PhaseDraft(mode, run, makespans(plans), _balanced(request, plan.rounds, rest), plan)


def data_parallel_plans(request: PlanRequest, members: Sequence[Workload]) -> dict[str, Plan]:
    """Return plans of a data-parallel phase: with equal batches, and with balanced ones."""
    plans = {DATA_PARALLEL: data_parallel_plan(request, members, request.planner_options)}
    types = {node.gpu_type or "" for node in request.scenario.cluster.nodes}
    is_measured = all(types <= set(member.rates_by_type) for member in members)
    if request.planner_options.balance != OFF and len(types) > 1 and is_measured:
        balanced = replace(request.planner_options, mix_types=True)
        plans[BALANCED] = data_parallel_plan(request, members, balanced)
    return plans


def makespans(plans: Mapping[str, Plan]) -> dict[str, float]:
    """Return the simulated times of plans."""
    return {mode: plan.predicted_makespan_s for mode, plan in plans.items()}


def _balanced(
    request: PlanRequest, rounds: Iterable[Round], members: Iterable[Workload]
) -> tuple[Round, ...]:
    """Return rounds with batches for members that have GPUs of several types."""
    gpu_types = {node.name: node.gpu_type or "" for node in request.scenario.cluster.nodes}
    if len(set(gpu_types.values())) < 2:
        return tuple(rounds)
    # Imported here since batches differ only between types of GPU.
    from hetctl.methods.balance.managers import first_batches

    by_name = {member.name: member for member in members}
    chunk_of = {member.name: member.step_samples for member in request.ensemble.members}

    def with_batches(given: Allocation) -> Allocation:
        workload, chunk = by_name[given.member], chunk_of[given.member](given.gpus)
        batches = first_batches(given, chunk, gpu_types, lambda t: workload.on_type(t).rates[given.gpus])
        return replace(given, batch_sizes=batches)

    return tuple(
        replace(planned, allocations=tuple(map(with_batches, planned.allocations))) for planned in rounds
    )


def assembled(
    request: PlanRequest, phases: Sequence[PhaseDraft], choices: tuple[ModeChoice, ...], bound_s: float
) -> Plan:
    """Return the plan in which each phase begins at the end of the previous one.

    Parameters
    ----------
    bound_s : float
        Lower bound of the time from the start of the first members, in seconds.
    """
    lower_bound_s = request.scenario.timing.job_start_s + bound_s if phases else 0.0
    starts_s = [0.0]
    for phase in phases:
        starts_s.append(starts_s[-1] + phase.run.seconds + request.scenario.timing.job_overhead_s)
    makespan_s = starts_s[-1] - request.scenario.timing.job_overhead_s if phases else 0.0
    begun = list(zip(phases, starts_s, strict=False))
    rounds = [
        replace(planned, start_s=planned.start_s + start_s)
        for phase, start_s in begun
        for planned in phase.rounds
    ]
    last = next((phase.plan for phase in phases if phase.plan), None)
    return Plan(
        planner=last.planner if last else request.planner,
        objective=request.planner_options.objective,
        gpus=request.gpus,
        gpus_per_node=request.scenario.cluster.gpus_per_node,
        predicted_makespan_s=makespan_s,
        lower_bound_s=lower_bound_s,
        ratio=makespan_s / lower_bound_s if lower_bound_s else 1.0,
        rounds=tuple(replace(planned, index=index) for index, planned in enumerate(rounds)),
        members=_forecasts(request.ensemble, begun),
        options=asdict(request.planner_options),
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
