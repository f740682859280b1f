"""Simulated time of a run with other planners and on other clusters, at the rates measured in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hetctl.app.plan.planning import JOB_OVERHEAD_S, ROUND_OVERHEAD_S
from hetctl.model.errors import InfeasibleError
from hetctl.model.events import Event
from hetctl.model.plan import USUAL_PLANNER
from hetctl.model.run import LOCKSTEP, RunSpec
from hetctl.model.run_status import MOST_SIMULATED, Comparison, OnCluster
from hetctl.model.site import Cluster
from hetctl.model.training_progress import EpochHistory, Progress
from hetctl.model.workload import Workload
from hetctl.perf.workloads import active_workloads
from hetctl.scheduling.fusing import fused_shape
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import options_from
from hetctl.scheduling.simulate.forecast import forecast
from hetctl.scheduling.simulate.scenario import JobTiming, Scenario

BASELINE = "independent"
"""Planner that gives each member one GPU, and each free GPU the next member."""
CLUSTERS = tuple((nodes, 4) for nodes in (1, 2, 4))
"""Nodes, and GPUs of each, of the clusters on which a run is simulated as well."""


def comparison_of(
    spec: RunSpec, progress: Mapping[str, Progress], events: Sequence[Event]
) -> Comparison | None:
    """Simulate a finished run with its own planner, with the baseline, and with both on other clusters.

    All are given the rates measured in training, and train the same epochs as the run.

    Returns
    -------
    Comparison or None
        None if the run is unfinished, or its members do not fit its jobs at these rates.
    """
    if not progress or any(not member.converged for member in progress.values()):
        return None
    # Commands that report no epoch leave nothing to simulate, nor do epochs without any rate.
    epochs = sum(len(member.epochs) for member in progress.values())
    known_gpus = _known_gpus(spec, progress)
    if not epochs or not known_gpus or not (members := _as_trained(spec, progress, spec.gpus)):
        return None
    timing = JobTiming(spec.wall_s, spec.grace_s, ROUND_OVERHEAD_S, JOB_OVERHEAD_S)
    scenario = Scenario(Cluster.at(spec.site, spec.gpus), timing, lockstep=spec.sharing == LOCKSTEP)
    options = options_from(spec.options)
    rank_start_s = _rank_start_s(members, events)
    try:
        own = forecast(planner_named(spec.planner), members, scenario, options)
        alone = [replace(member, fuses="") for member in members]
        baseline = forecast(planner_named(BASELINE), alone, replace(scenario, lockstep=False), options)
    except InfeasibleError:
        return None
    return Comparison(
        baseline=BASELINE,
        baseline_s=rank_start_s + baseline.predicted_makespan_s,
        simulated_s=rank_start_s + own.predicted_makespan_s,
        epochs=epochs,
        clusters=tuple(_on_clusters(spec, progress, rank_start_s)),
        known_gpus=known_gpus,
    )


def _on_clusters(spec: RunSpec, progress: Mapping[str, Progress], rank_start_s: float) -> Iterator[OnCluster]:
    """Yield the times on the clusters that are large enough for each member; none for too many members."""
    if len(progress) > MOST_SIMULATED:
        return
    timing = JobTiming(None, 0.0, ROUND_OVERHEAD_S, JOB_OVERHEAD_S)
    options = options_from({})
    for nodes, per_node in CLUSTERS:
        gpus = nodes * per_node
        # All nodes of a cluster have the type of GPU whose rates are `rates`.
        members = [
            replace(member, rates_by_type={}, fuses="") for member in _as_trained(spec, progress, gpus)
        ]
        if any(member.min_gpus > gpus for member in members):
            continue
        scenario = Scenario(Cluster.of(gpus, per_node), timing)
        baseline_s, fluid_s = (
            rank_start_s + forecast(planner_named(name), members, scenario, options).predicted_makespan_s
            for name in (BASELINE, USUAL_PLANNER)
        )
        yield OnCluster(nodes, gpus, baseline_s, fluid_s)


def _known_gpus(spec: RunSpec, progress: Mapping[str, Progress]) -> int:
    """Return the largest number of GPUs on which some member's rate was seen or profiled; 0: none."""
    profiled = (gpus for profile in spec.profiles for gpus in profile.rates)
    seen = (gpus for member in progress.values() for _, gpus, _ in EpochHistory.of(member.epochs).rates)
    return max((*profiled, *seen), default=0)


def _as_trained(spec: RunSpec, progress: Mapping[str, Progress], gpus: int) -> list[Workload]:
    """Return the members in their initial state, with the work and the rates of the run."""
    profiles, options = {profile.member: profile for profile in spec.profiles}, options_from(spec.options)
    restarted = {
        name: replace(member, converged=None, failed=None, part_samples=0)
        for name, member in progress.items()
    }
    found = active_workloads(
        spec.ensemble,
        profiles,
        restarted,
        gpus,
        in_lockstep=spec.sharing == LOCKSTEP,
        fuses=lambda one: fused_shape(one, spec.ensemble, spec.site.launch, spec.sharing, options),
    )
    return [
        replace(member, samples_left=float(len(progress[member.name].epochs) * member.samples_per_epoch))
        for member in found
        if member.samples_per_epoch
    ]


def _rank_start_s(members: Sequence[Workload], events: Sequence[Event]) -> float:
    """Return how many seconds the first step started up longer than simulated: the start of the ranks."""
    startup_s = {member.name: member.startup_s for member in members}
    for event in events:
        if event.kind == "first_step" and event.source in startup_s:
            return max(0.0, float(event.record.startup_s) - startup_s[event.source])
    return 0.0
