"""Simulated time of a run with other planners, at the rates that were measured in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetctl.app.plan.planning import JOB_OVERHEAD_S, ROUND_OVERHEAD_S
from hetctl.model.errors import InfeasibleError
from hetctl.model.events import Event
from hetctl.model.run import LOCKSTEP, RunSpec
from hetctl.model.run_status import Comparison
from hetctl.model.site import Cluster
from hetctl.model.training_progress import Progress
from hetctl.model.workload import Workload
from hetctl.perf.workloads import active_workloads
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import options_from
from hetctl.scheduling.simulate.forecast import forecast
from hetctl.scheduling.simulate.scenario import JobTiming, Scenario

BASELINE = "independent"
"""Planner that gives each member one GPU, and each free GPU the next member."""


def comparison_of(
    spec: RunSpec, progress: Mapping[str, Progress], events: Sequence[Event]
) -> Comparison | None:
    """Simulate a finished run with its own planner and with the baseline.

    Both are given the rates measured in training, and train the same epochs as the run.

    Returns
    -------
    Comparison or None
        None if the run is unfinished, or its members do not fit its jobs at these rates.
    """
    if not progress or any(not member.converged for member in progress.values()):
        return None
    # Commands that report no epoch leave nothing to simulate.
    epochs = sum(len(member.epochs) for member in progress.values())
    if not epochs or not (members := _as_trained(spec, progress)):
        return None
    timing = JobTiming(spec.wall_s, spec.grace_s, ROUND_OVERHEAD_S, JOB_OVERHEAD_S)
    scenario = Scenario(Cluster.at(spec.site, spec.gpus), timing, lockstep=spec.sharing == LOCKSTEP)
    options = options_from(spec.options)
    rank_start_s = _rank_start_s(spec, events)
    try:
        own = forecast(planner_named(spec.planner), members, scenario, options)
        baseline = forecast(planner_named(BASELINE), members, replace(scenario, lockstep=False), options)
    except InfeasibleError:
        return None
    return Comparison(
        baseline=BASELINE,
        baseline_s=rank_start_s + baseline.predicted_makespan_s,
        simulated_s=rank_start_s + own.predicted_makespan_s,
        epochs=epochs,
    )


def _as_trained(spec: RunSpec, progress: Mapping[str, Progress]) -> list[Workload]:
    """Return the members in their initial state, with the work and the rates of the run."""
    profiles = {profile.member: profile for profile in spec.profiles}
    restarted = {
        name: replace(member, converged=None, failed=None, part_samples=0)
        for name, member in progress.items()
    }
    found = active_workloads(
        spec.ensemble,
        profiles,
        restarted,
        spec.gpus,
        in_lockstep=spec.sharing == LOCKSTEP,
    )
    return [
        replace(member, samples_left=float(len(progress[member.name].epochs) * member.samples_per_epoch))
        for member in found
        if member.samples_per_epoch
    ]


def _rank_start_s(spec: RunSpec, events: Sequence[Event]) -> float:
    """Return how many seconds the first step started up longer than profiled: the start of the ranks."""
    startup_s = {profile.member: profile.startup_s for profile in spec.profiles}
    for event in events:
        if event.kind == "first_step" and event.source in startup_s:
            return max(0.0, float(event.record.startup_s) - startup_s[event.source])
    return 0.0
