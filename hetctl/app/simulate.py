"""Simulation of an ensemble on a real or hypothetical cluster."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hetctl.app.plan.job_request import refuse_wide_members
from hetctl.app.plan.planning import AUTO, check_planner, chosen, with_defaults, with_limit_of_shares
from hetctl.app.profile.catalog_profiles import profiles_at
from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.model.combinations import (
    NO_FLOTILLAS,
    SEVERAL_TYPES,
    SHARED_GPUS,
    features_of,
    refuse_conflicts,
)
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.plan import USUAL_PLANNER
from hetctl.model.profile import MemberProfile
from hetctl.model.run import CACHED, LOCKSTEP
from hetctl.model.simulation import Simulated, Simulation, SimulationResult
from hetctl.model.site import NODES, Cluster
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload
from hetctl.perf.sharing import GpuTerms
from hetctl.perf.workloads import active_workloads
from hetctl.scheduling.fusing import fused_shape
from hetctl.scheduling.planners.base import options_from
from hetctl.scheduling.simulate.rate_learner import RateLearner
from hetctl.scheduling.simulate.scenario import Arrival, Failures, JobTiming, Scenario, WorkEstimate
from hetctl.scheduling.simulate.simulate_run import simulate

if TYPE_CHECKING:
    from hetctl.app.simulated_search import SimulatedSearch

GPUS_PER_NODE = 4
"""Default number, if neither the user nor the profile's site gives one."""
OF_SCENARIO = ("restart_s", "wall_s", "sample_members", "arrival_mean_s", "node_mtbf_s", "learn_rates_s")
"""Parts of a request that are reported with its result."""


@dataclass(frozen=True)
class SimulateRequest:
    """Input of a simulation.

    Parameters
    ----------
    site : str or None
        Site where the rates were measured; None: the only one.
    gpus : mapping of str to int
        Numbers of GPUs by type; under "" if there is only one type.
    gpus_per_node : int or None
        GPUs of a node; None: as at that site.
    planner : str
        Name of a planner, or ``auto``.
    options : mapping
        Options of the planner; their seed is used for all random draws.
    restart_s : float or None
        Seconds of each start except the first, instead of all times that were measured beside the
        rates. None: start-up, evaluation and checkpoints take as long as measured.
    wall_s : int or None
        Wall-clock limit of each job in seconds.
    sample_members : int or None
        Number of members drawn from the ensemble's; None: each is there once.
    arrival_mean_s : float or None
        Mean of the exponential gaps between arrivals in seconds; None: all arrive at the start.
    node_mtbf_s : float or None
        Mean time between failures of a node in seconds; None: no failures.
    predicted : bool
        True if planners see the work left only as predicted from the losses so far.
    learn_rates_s : float or None
        Seconds of training on a number of GPUs after which planners see the rate there; None: they know all
        rates from the start.
    """

    ensemble: Ensemble
    gpus: Mapping[str, int]
    gpus_per_node: int | None = None
    site: str | None = None
    planner: str = USUAL_PLANNER
    options: Mapping[str, Any] = field(default_factory=dict)
    restart_s: float | None = None
    wall_s: int | None = None
    sample_members: int | None = None
    arrival_mean_s: float | None = None
    lockstep: bool = False
    node_mtbf_s: float | None = None
    predicted: bool = False
    learn_rates_s: float | None = None

    def __post_init__(self) -> None:
        """Raise BadInputError on an unknown planner or wrong option before any file is opened."""
        check_planner(self.planner, with_limit_of_shares(self.options, self.ensemble, None))


def run_simulation(project: Project, request: SimulateRequest) -> SimulationResult:
    """Simulate an ensemble with its rates in the catalog.

    Raises
    ------
    BadInputError
        If there is no profile, or several and no site was named, or a member's profile is missing.
    InfeasibleError
        If the round limit is too short for some member to make any progress, or it needs more GPUs.
    """
    sharing = LOCKSTEP if request.lockstep else CACHED
    with project.reading() as catalog:
        site, known = _measured(catalog, request.ensemble, request.site)
        measured_at = catalog.site(site)
    as_there = measured_at if len(request.gpus) == 1 else None
    options = options_from(
        with_defaults(request.options, request.ensemble, as_there, request.planner, sharing)
    )
    per_node = request.gpus_per_node or (measured_at.gpus_per_node if measured_at else GPUS_PER_NODE)
    profiles = {profile.member: profile for profile in known}
    _refuse_unknown_types(request, profiles.values())
    scenario = _scenario(request, per_node, options.seed)
    if options.max_per_gpu > 1:
        types = [SEVERAL_TYPES] if len(request.gpus) > 1 else []
        refuse_conflicts(request.ensemble.name, SHARED_GPUS, *types, sharing=sharing)
    refuse_wide_members(request.ensemble.members, scenario.cluster, mix_types=options.mix_types)
    terms = GpuTerms(options.max_per_gpu)
    planned = active_workloads(
        *(request.ensemble, profiles, {}, sum(request.gpus.values())),
        terms=terms,
        fuses=lambda member: fused_shape(member, request.ensemble, NODES, sharing, options),
    )
    members = _as_restarting(planned, request.restart_s)
    arrivals = _arrivals(members, request, options.seed)
    learner = _learner(arrivals, request, terms)
    expected = _foreseen(arrivals, request, options.seed, learner) if request.planner == AUTO else arrivals
    choice = chosen(request.planner, expected, replace(scenario, failures=None), options)
    if request.lockstep and not choice.planner.trains_as_group:
        refuse_conflicts(choice.planner.name, NO_FLOTILLAS, sharing=LOCKSTEP)
    estimator = _estimator(arrivals, request, options.seed)
    scenario = replace(scenario, rate_learner=learner)
    search = _search(members, request, options.seed)
    if search is None:
        result = simulate(choice.planner, arrivals, replace(scenario, work_estimator=estimator), options)
    else:
        arrivals = [*map(Arrival, search.first())]
        result = simulate(choice.planner, arrivals, scenario, options, search.after)
    return SimulationResult(
        simulation=replace(result, reason=choice.reason),
        ensemble=request.ensemble.name,
        site=site,
        arrivals={arrival.workload.name: arrival.at_s for arrival in arrivals},
        work_errors=getattr(estimator, "errors", dict)(),
        search=search.outcome if search else None,
    )


def searched(ensemble: Ensemble) -> Ensemble:
    """Return an ensemble that has a search.

    Raises
    ------
    BadInputError
        If it has none.
    """
    if ensemble.search is None:
        raise BadInputError(
            f"ensemble {ensemble.name} has no search", "leave out --search, or add one to its file"
        )
    return ensemble


def simulated(project: Project, request: SimulateRequest) -> Simulated:
    """Return the result of `run_simulation` with its JSON and its trace."""
    result = run_simulation(project, request)
    fields = {
        "ensemble": result.ensemble,
        "site": result.site,
        **{name: value for name, value in vars(result.simulation).items() if name != "intervals"},
        **{name: getattr(request, name) for name in OF_SCENARIO},
        "work_errors": result.work_errors,
        "search": result.search,
    }
    return Simulated(result, fields, lambda: trace_of(result.simulation))


def trace_of(simulation: Simulation) -> str:
    """Return one line of JSON for each interval in which a member held a constant number of GPUs."""
    names = ("member", "gpus", "start_s", "end_s", "restart_s", "samples")
    intervals = simulation.intervals
    return "".join(json.dumps({name: getattr(one, name) for name in names}) + "\n" for one in intervals)


def _measured(
    catalog: Catalog, ensemble: Ensemble, wanted: str | None
) -> tuple[str, tuple[MemberProfile, ...]]:
    """Return the site where an ensemble was measured, and its profiles there."""
    sites = catalog.profiled_sites(ensemble.name)
    known = {site: own for site in sites if (own := profiles_at(catalog, ensemble, site))}
    if not known:
        raise BadInputError(
            f"there is no profile of {ensemble.name}",
            "run `hetctl profile`, or make an ensemble of a rate table:"
            " `hetctl profile import rates.csv --name NAME`",
        )
    found = [site for site in known if wanted in (None, site)]
    if not found:
        raise BadInputError(
            f"there is no profile of {ensemble.name} at site {wanted!r}",
            f"there is one at: {', '.join(known)}",
        )
    if len(found) > 1:
        raise BadInputError(
            f"{ensemble.name} was measured at several sites: {', '.join(found)}", "choose one with --rates-of"
        )
    return found[0], known[found[0]]


def _refuse_unknown_types(request: SimulateRequest, profiles: Iterable[MemberProfile]) -> None:
    for profile in profiles:
        known = sorted(profile.rates_by_type or {profile.gpu_type or ""})
        example = ",".join(f"{gpu_type}:N" for gpu_type in known)
        if "" in request.gpus and len(known) > 1:
            raise BadInputError(
                f"{profile.member} was measured on several types of GPU: {', '.join(known)}",
                f"give the number of each: --gpus {example}",
            )
        for gpu_type in request.gpus.keys() - {"", *known}:
            raise BadInputError(
                f"{profile.member} was not measured on GPUs of type {gpu_type!r}, only on {', '.join(known)}",
                f"import its rates there, or use --gpus {example}",
            )


def _as_restarting(members: Sequence[Workload], restart_s: float | None) -> list[Workload]:
    if restart_s is None:
        return list(members)
    return [
        replace(
            member,
            startup_s=0.0,
            restart_s=restart_s,
            epoch_s=0.0,
            evaluate_s=0.0,
            checkpoint_s=0.0,
            save_s=None,
        )
        for member in members
    ]


def _arrivals(members: Sequence[Workload], request: SimulateRequest, seed: int) -> list[Arrival]:
    """Draw members and arrivals from separate random streams, so that the gaps do not change the members."""
    chosen = list(members)
    if request.sample_members is not None:
        drawn = random.Random(f"{seed}:jobs").choices(members, k=request.sample_members)
        chosen = [
            replace(member, name=f"{member.name}-{number:04d}", family=member.name)
            for number, member in enumerate(drawn, start=1)
        ]
    if request.arrival_mean_s is None:
        return [Arrival(member) for member in chosen]
    draw = random.Random(f"{seed}:arrivals")
    gaps = [draw.expovariate(1 / request.arrival_mean_s) for _ in chosen[1:]]
    return [
        Arrival(member, at_s) for member, at_s in zip(chosen, accumulate(gaps, initial=0.0), strict=False)
    ]


def _search(members: Sequence[Workload], request: SimulateRequest, seed: int) -> SimulatedSearch | None:
    """Return the search of the ensemble; None if it has none.

    Raises
    ------
    BadInputError
        If an option of the request does not go with a search.
    """
    if request.ensemble.search is None:
        return None
    refuse_conflicts(
        *(request.ensemble.name, *features_of(request.ensemble)),
        *(["--sample-members"] if request.sample_members is not None else []),
        *(["--arrival-mean"] if request.arrival_mean_s is not None else []),
        *(["--work predicted"] if request.predicted else []),
    )
    # Imported here since most ensembles have no search.
    from hetctl.app.simulated_search import SimulatedSearch

    workloads = {member.name: member for member in members}
    return SimulatedSearch(request.ensemble, workloads, sum(request.gpus.values()), seed)


def _scenario(request: SimulateRequest, gpus_per_node: int, seed: int) -> Scenario:
    return Scenario(
        cluster=Cluster.of_types({name: (gpus, gpus_per_node) for name, gpus in request.gpus.items()}),
        timing=JobTiming(request.wall_s),
        lockstep=request.lockstep,
        failures=Failures(request.node_mtbf_s, seed=seed) if request.node_mtbf_s else None,
    )


def _estimator(arrivals: Sequence[Arrival], request: SimulateRequest, seed: int) -> WorkEstimate | None:
    if not request.predicted:
        return None
    from hetctl.scheduling.simulate.work_estimator import WorkEstimator

    return WorkEstimator([arrival.workload for arrival in arrivals], seed)


def _learner(arrivals: Sequence[Arrival], request: SimulateRequest, terms: GpuTerms) -> RateLearner | None:
    """Return what planners learn of the rates; None if they know them.

    Raises
    ------
    BadInputError
        If the rates depend on the type of GPU, or the ensemble has a search.
    """
    if request.learn_rates_s is None:
        return None
    refuse_conflicts(
        *(request.ensemble.name, *features_of(request.ensemble)),
        *("--learn-rates", *([SEVERAL_TYPES] if len(request.gpus) > 1 else [])),
    )
    members = {member.name: member for member in request.ensemble.members}
    drawn = [
        replace(members[workload.family or workload.name], name=workload.name, max_gpus=workload.max_gpus)
        for workload in (arrival.workload for arrival in arrivals)
    ]
    others = (member for name, member in members.items() if all(name != one.name for one in drawn))
    ensemble = replace(request.ensemble, members=(*drawn, *others))
    return RateLearner(ensemble, sum(request.gpus.values()), request.learn_rates_s, terms)


def _foreseen(
    arrivals: Sequence[Arrival], request: SimulateRequest, seed: int, learner: RateLearner | None
) -> Sequence[Arrival]:
    """Return the arrivals with their work and rates as estimated at the start."""
    if learner is not None:
        arrivals = [replace(arrival, workload=learner.seen(arrival.workload)) for arrival in arrivals]
    estimator = _estimator(arrivals, request, seed)
    if estimator is None:
        return arrivals
    known = estimator([arrival.workload for arrival in arrivals])
    return [replace(arrival, workload=c) for arrival, c in zip(arrivals, known, strict=True)]
