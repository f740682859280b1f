"""Planning from the profiles in the catalog: input of plans in all modes, and data-parallel plans."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from hetctl import __version__
from hetctl.app.plan.job_request import refuse_wide_members
from hetctl.app.profile.catalog_profiles import (
    beyond_measured,
    current_layers,
    member_profiles,
    warnings_of,
)
from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.cluster.launchers import LAUNCHERS
from hetctl.methods.parallelism import Demand, ModeLimits, does_not_fit, too_large
from hetctl.model.combinations import (
    HOPS,
    NO_FLOTILLAS,
    SEVERAL_TYPES,
    SHARED_GPUS,
    conflicts,
    features_of,
    refuse_conflicts,
)
from hetctl.model.cost import Cost
from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.interpreter import load_entry
from hetctl.model.job import JobSize
from hetctl.model.plan import DATA_PARALLEL, HOPPER, PIPELINE, USUAL_PLANNER, Plan, Round
from hetctl.model.profile import LayerPoint, MemberProfile, shape_digest
from hetctl.model.run import CACHED, LOCKSTEP
from hetctl.model.serialization import encode
from hetctl.model.site import MEMBERS, Cluster, Site
from hetctl.model.training_progress import Progress
from hetctl.model.training_settings import OFF
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload
from hetctl.perf.sharing import GpuTerms
from hetctl.perf.workloads import active_workloads
from hetctl.scheduling.fusing import fused_shape
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import MEAN_JCT, Options, options_from
from hetctl.scheduling.planners.heterogeneous import gpus_by_type
from hetctl.scheduling.simulate.scenario import Arrival, JobTiming, Scenario

if TYPE_CHECKING:
    from hetctl.app.simulated_search import LikelySearch, SimulatedSearch
    from hetctl.scheduling.simulate.simulate_run import PlannerChoice

AUTO = "auto"
"""Name for the planner with the best simulation, or for the mode that suits a member."""
ROUND_OVERHEAD_S = 0.5
"""Seconds from the end of one round to the launch of the next, in the same job."""
MOST_TRIALS = 2000
"""Number of trials above which a data-parallel plan does not ask for them in turn: it would take minutes."""
JOB_OVERHEAD_S = 3.0
"""Seconds from the end of one job to the start of the next, without waiting in the queue."""


@dataclass(frozen=True)
class PlanRequest:
    """All that a plan is made from.

    Parameters
    ----------
    planner : str
        Name of a planner, or ``auto``.
    options : mapping
        Options of the planner, as in `planners.base.Options`.
    explain : bool
        True to add to each round the reasons for its allocations and for waiting.
    sharing : str
        Sharing of data, as in `RunSpec`.
    mode : str
        ``data-parallel``, ``hopper`` or ``pipeline`` for all members, or ``auto`` for the mode that suits
        each.
    layers : mapping
        Measured layers of members that name no layer profile, one measurement for each type of GPU.
    profiles : mapping of str to MemberProfile
        Profiles by member, without rates if none is known.
    progress : mapping of str to Progress
        Progress of members that have been trained.
    """

    ensemble: Ensemble
    site: Site
    size: JobSize
    planner: str = USUAL_PLANNER
    options: Mapping[str, Any] = field(default_factory=dict)
    explain: bool = False
    sharing: str = CACHED
    mode: str = DATA_PARALLEL
    layers: Mapping[str, Sequence[LayerPoint]] = field(default_factory=dict)
    profiles: Mapping[str, MemberProfile] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise BadInputError on an unknown planner or wrong option before any file is opened."""
        check_planner(self.planner, self.options)

    @property
    def digest(self) -> str:
        """Digest of the input, this version of hetctl included."""
        # Explanations do not change a plan; another version of hetctl may.
        inputs = [__version__, encode(replace(self, ensemble=self.trainable, explain=False))]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()

    @cached_property
    def trainable(self) -> Ensemble:
        """The ensemble with one GPU for members that need a missing package for more."""
        return self.ensemble.as_installed(self.site.other_python, one_gpu=self.site.has_mig)

    @cached_property
    def planner_options(self) -> Options:
        """Options of the planner, with defaults for those that were not given."""
        return options_from(self.options)

    @cached_property
    def scenario(self) -> Scenario:
        """Jobs in which the plan is carried out."""
        size = self.size
        job_start_s = max((profile.job_start_s for profile in self.profiles.values()), default=0.0)
        timing = JobTiming(size.wall_s, size.grace_s, ROUND_OVERHEAD_S, JOB_OVERHEAD_S, job_start_s)
        return Scenario(Cluster.at(self.site, size.gpus), timing, lockstep=self.sharing == LOCKSTEP)

    @property
    def begins_search(self) -> bool:
        """True if a run would begin a search; one that goes on has asked for its trials."""
        return self.ensemble.search is not None and not self.progress

    @cached_property
    def likely_search(self) -> LikelySearch | None:
        """Likely training of the search of a new run; None without one, or without known epochs."""
        if not self.begins_search:
            return None
        # Imported here since most ensembles have no search.
        from hetctl.app.simulated_search import likely_search

        members = active_workloads(self.trainable, self.profiles, {}, self.gpus)
        return likely_search(self.trainable, members, self.gpus, self.planner_options.seed)

    def workloads(self, without: Container[str] = ()) -> tuple[Workload, ...]:
        """Return the members left to train, but for some, as they share GPUs and train fused in a job."""
        ensemble, site, options = self.trainable, self.site, self.planner_options
        return active_workloads(
            replace(ensemble, members=tuple(m for m in ensemble.members if m.name not in without)),
            self.profiles,
            self.progress,
            self.gpus,
            in_lockstep=self.scenario.lockstep,
            terms=GpuTerms.at(site, options.max_per_gpu),
            fuses=lambda member: fused_shape(member, self.ensemble, site.launch, self.sharing, options),
        )

    @property
    def waits(self) -> float:
        """Factor by which trials that wait at rungs lengthen a phase in which all begin at the start."""
        return self.likely_search.waits if self.likely_search else 1.0

    @property
    def gpus(self) -> int:
        """Number of GPUs of a job."""
        return self.scenario.cluster.gpus

    def cost(self, plan: Plan) -> Cost | None:
        """Return the predicted cost of a run with a plan of this request; None if rates are guesses."""
        if not all(profile.has_rates for profile in self.profiles.values()):
            return None
        return self.site.cost(plan.predicted_makespan_s * self.size.nodes, self.gpus)

    @property
    def partitions(self) -> int:
        """Number of partitions of the data; 0 if it is not partitioned."""
        given = self.ensemble.partitions
        return given.count if given else 0

    @property
    def homes(self) -> Mapping[str, frozenset[int]]:
        """Numbers of the partitions that each node is expected to have."""
        given = self.ensemble.partitions
        names = [node.name for node in self.scenario.cluster.nodes]
        return given.homes(names) if given else {}


def data_parallel_plan(
    request: PlanRequest,
    members: Sequence[Workload],
    options: Options,
    searches: Sequence[SimulatedSearch] = (),
) -> Plan:
    """Return the plan of members for data-parallel training.

    Parameters
    ----------
    searches : sequence of SimulatedSearch
        The search that asks for trials among the members, with several draws of losses, of which the median
        plan counts; empty: all members train from the start.

    Raises
    ------
    BadInputError
        If the planner or the launcher does not support the requested sharing.
    """
    # Imported here, as in `chosen`: most commands on runs plan nothing.
    from hetctl.scheduling.simulate.forecast import forecast

    scenario = request.scenario
    choice = chosen(request.planner, [Arrival(member) for member in members], scenario, options)
    if not choice.planner.trains_as_group:
        refuse_conflicts(choice.planner.name, NO_FLOTILLAS, sharing=request.sharing)
    site = request.site
    # Members of a node share a stream.
    chosen_by_launcher = site.launch == MEMBERS and LAUNCHERS[site.launcher].chooses_nodes
    if request.sharing == LOCKSTEP and chosen_by_launcher and request.size.gpus > site.gpus_per_node:
        raise BadInputError(
            f"with launch: members, {site.launcher} chooses the nodes of each member, and members in lockstep"
            " must know which members share their node",
            "choose --launch nodes, or --sharing cached",
        )
    predict = partial(forecast, choice.planner, scenario=scenario, options=options, explain=request.explain)
    plans = [predict(search.first(), successors=search.after) for search in searches] or [predict(members)]
    plan = sorted(plans, key=lambda plan: plan.predicted_makespan_s)[len(plans) // 2]
    gains = {} if options.balance == OFF else _balance_gains(plan, members, scenario.cluster)
    rounds = tuple(_with_guesses(planned, members) for planned in plan.rounds)
    # Plans of a search have its waits already.
    waits = 1.0 if searches else request.waits
    return replace(
        plan,
        reason=choice.reason,
        balance_gains=gains,
        rounds=rounds,
        predicted_makespan_s=waits * plan.predicted_makespan_s,
        ratio=waits * plan.ratio,
    )


def _with_guesses(planned: Round, members: Sequence[Workload]) -> Round:
    """Return a round that says which of its rates are estimates: a plan takes them as they are."""
    spread = {member.name: member.spread for member in members}
    given = (replace(a, rate_known=not spread[a.member].get(a.gpus)) for a in planned.allocations)
    return replace(planned, allocations=tuple(given))


def _balance_gains(plan: Plan, members: Sequence[Workload], cluster: Cluster) -> dict[str, float]:
    """Return each member's gain by balanced batches, where it first has GPUs of several types."""
    types = {node.name: node.gpu_type or "" for node in cluster.nodes}
    workloads = {member.name: member for member in members}
    gains: dict[str, float] = {}
    for given in (allocation for planned in plan.rounds for allocation in planned.allocations):
        gpus = gpus_by_type(given, types)
        workload, count = workloads[given.member], given.gpus
        # A type on which the member was not measured counts as another type, and would hide the gain.
        if len(gpus) > 1 and gpus.keys() <= workload.rates_by_type.keys() and given.member not in gains:
            equal = workload.on_slowest(gpus).rates[count]
            gains[given.member] = workload.on_balanced(gpus).rates[count] / equal
    return gains


def with_limit_of_shares(
    options: Mapping[str, Any],
    ensemble: Ensemble,
    site: Site | None,
    planner: str = USUAL_PLANNER,
    sharing: str = CACHED,
    mode: str = DATA_PARALLEL,
) -> dict[str, Any]:
    """Return options of a planner with the number of members on a GPU in place of ``auto``.

    That is more than 1 only where they can share a GPU, and the site says how much memory it has.
    """
    if options.get("max_per_gpu") != AUTO:
        return {**options}
    features = {SHARED_GPUS, *features_of(ensemble), f"--sharing {sharing}"}
    if site:
        # Jobs on some nodes of a machine with several types may get others than planned.
        features |= {f"--launch {site.launch}", *([SEVERAL_TYPES] if site.node_types else [])}
    is_shared = (
        planner in (USUAL_PLANNER, AUTO)
        and mode == DATA_PARALLEL
        and options.get("objective") != MEAN_JCT
        and not any(conflicts(features))
    )
    return {**options, "max_per_gpu": GpuTerms.most_at(site) if site and is_shared else 1}


def check_planner(name: str, options: Mapping[str, Any]) -> None:
    """Raise BadInputError if there is no such planner, or an option is wrong."""
    if name != AUTO:
        planner_named(name)
    options_from(options)


def with_defaults(
    given: Mapping[str, Any],
    ensemble: Ensemble,
    site: Site | None,
    planner: str,
    sharing: str,
    mode: str = DATA_PARALLEL,
) -> dict[str, Any]:
    """Return a planner's options: those that were given, or else as the ensemble, and then the site, say."""
    most = ensemble.max_per_gpu or (site.max_per_gpu if site else 1)
    # All other planners are as published.
    fuses = ensemble.fuse == AUTO and planner in (USUAL_PLANNER, AUTO)
    options = {"balance": ensemble.balance.mode, "max_per_gpu": most, "fuse": fuses, **given}
    return with_limit_of_shares(options, ensemble, site, planner, sharing, mode)


def chosen(name: str, arrivals: Sequence[Arrival], scenario: Scenario, options: Options) -> PlannerChoice:
    """Return the planner of that name, or for ``auto`` the best one in simulations."""
    from hetctl.scheduling.simulate.simulate_run import PlannerChoice, choose

    return choose(arrivals, scenario, options) if name == AUTO else PlannerChoice(planner_named(name))


def limits_of(request: PlanRequest) -> ModeLimits:
    """Return the memory of the smallest GPU of a job, and the number of partitions."""
    memory = request.site.memory_in(request.scenario.cluster)
    # An unknown memory counts as the smallest: nothing is then known to be too large for it.
    smallest = min(memory, key=lambda gpu_type: memory[gpu_type] or 0)
    return ModeLimits(
        gpus=request.gpus,
        gpu=f"a {smallest or request.site.device} of {request.site.name}",
        memory_bytes=memory[smallest],
        partitions=request.partitions,
    )


def demands_of(request: PlanRequest, summed: Mapping[str, int]) -> list[Demand]:
    """Return the memory that each member needs of a GPU: measured, or else the sum over its layers.

    Parameters
    ----------
    summed : mapping of str to int
        Bytes of all layers of the members whose layers are known.
    """
    measured = {name: profile.peak_memory_bytes for name, profile in request.profiles.items()}
    return [
        Demand(
            member.name,
            demand_in_parts(member, measured.get(member.name) or summed.get(member.name), request.gpus),
        )
        for member in request.ensemble.members
    ]


def demand_in_parts(member: Member, memory_bytes: int | None, gpus: int) -> int | None:
    """Return the least memory of a member's rank on up to `gpus` GPUs, from that on its fewest.

    For divided members it is a lower bound: more GPUs do not make activations smaller.
    """
    if memory_bytes is None or not member.shard:
        return memory_bytes
    return memory_bytes * member.min_gpus // max(member.min_gpus, member.most_gpus(gpus))


def refuse_large_parts(ensemble: Ensemble, demands: Sequence[Demand], room: ModeLimits) -> None:
    """Raise InfeasibleError if even the least part of a divided member is too large."""
    for demand in demands:
        if ensemble.member(demand.member).shard and too_large(demand, room):
            raise InfeasibleError(
                does_not_fit(f"a part of {demand.member} on each of its GPUs", demand, room),
                "raise its max_gpus, lower its batch_size, or use GPUs with more memory",
            )


PLANS_BY_MODE = {
    AUTO: "hetctl.app.plan.multi_mode_plan:plan_modes",
    HOPPER: "hetctl.app.plan.hop_phases:plan_hopper",
    PIPELINE: "hetctl.app.plan.pipeline_phases:plan_pipelined",
}
"""Functions that plan in modes other than data-parallel, as ``module:function``: they import the methods."""


def with_profiles(catalog: Catalog, request: PlanRequest) -> PlanRequest:
    """Add the profiles in a catalog, and the measured layers and links where the files give none."""
    known = member_profiles(catalog, request.ensemble, request.site)
    request = replace(request, profiles={profile.member: profile for profile in known})
    return with_measurements(catalog, request) if request.mode in (AUTO, PIPELINE) else request


def with_measurements(catalog: Catalog, request: PlanRequest) -> PlanRequest:
    """Add the measured layers and links in the catalog where the files give none."""
    # Imported here since only members that may become pipelines have layers and links.
    from hetctl.app.profile.catalog_profiles import links_between

    ensemble, site = request.ensemble, request.site
    layers = _by_shape(ensemble, catalog.layers(ensemble.name, site.name), site)
    links = site.links or links_between(catalog.links(site.name), site)
    return replace(request, site=replace(site, links=links), layers=layers)


def plan_and_save(project: Project, request: PlanRequest) -> Plan:
    """Make a plan and store it in the catalog; an infeasible one leaves no new catalog behind."""
    with project.reading(or_empty=True) as catalog:
        plan = make_plan(with_profiles(catalog, request))
    with project.writing(create=True) as catalog:
        catalog.save_ensemble(request.ensemble)
        catalog.save_site(request.site)
        catalog.save_plan(request.ensemble.name, request.site.name, plan, time.time())
    return plan


def make_plan(request: PlanRequest) -> Plan:
    """Make a plan, with the digest of its input; errors are those of `plan_from`."""
    return replace(plan_from(request), inputs=request.digest)


def saved_or_new_plan(catalog: Catalog, request: PlanRequest) -> Plan:
    """Return the last saved plan if it was made from the same input, or else a new one.

    The plan that was shown is submitted, even if the planner searches for a given time.
    """
    saved = catalog.latest_plan(request.ensemble.name, request.site.name)
    return saved if saved and saved.inputs == request.digest else make_plan(request)


def warnings_about(project: Project, request: PlanRequest) -> list[str]:
    """Return warnings about the profiles that a plan is made from."""
    with project.reading() as catalog:
        request = with_profiles(catalog, request)
        saved = catalog.latest_plan(request.ensemble.name, request.site.name)
    profiles = tuple(request.profiles.values())
    of_ensemble = warnings_of(project, request.ensemble, request.site)
    if not saved or saved.inputs != request.digest:
        return of_ensemble
    return [*of_ensemble, *beyond_measured(saved, profiles)]


def _by_shape(ensemble: Ensemble, points: Sequence[LayerPoint], site: Site) -> dict[str, list[LayerPoint]]:
    """Return the layers of members without a file: their own, or those of another member of their shape."""
    without_file = {member.name: member for member in ensemble.members if member.layers is None}
    measured: dict[str, list[LayerPoint]] = {}
    for point in current_layers(points, ensemble, without_file, site):
        measured.setdefault(point.member, []).append(point)
    digests = {name: shape_digest(one, ensemble.rate_keys) for name, one in without_file.items()}
    of_shape = {digests[name]: own for name, own in reversed(measured.items())}
    found = {name: measured.get(name) or of_shape.get(digest, []) for name, digest in digests.items()}
    return {name: own for name, own in found.items() if own}


def plan_from(request: PlanRequest) -> Plan:
    """Make a plan from members' profiles.

    Raises
    ------
    BadInputError
        If the planner or an option is unknown, the planner does not support the requested sharing, members
        cannot hop as requested, or one has no profile in a mode that needs it.
    InfeasibleError
        If the site, the wall-clock limit or a member's `min_gpus` permit no plan.
    """
    ensemble, site, options = request.ensemble, request.site, request.planner_options
    refuse_conflicts(
        *(ensemble.name, *features_of(ensemble), *([HOPS] if request.mode == HOPPER else [])),
        *([SHARED_GPUS] if options.max_per_gpu > 1 else []),
        *([SEVERAL_TYPES] if len(site.types_in(request.scenario.cluster)) > 1 else []),
        mode=request.mode,
        sharing=request.sharing,
        balance=options.balance,
        launch=site.launch,
    )
    refuse_wide_members(ensemble.members, request.scenario.cluster, mix_types=options.mix_types)
    if request.mode in PLANS_BY_MODE:
        plan: Plan = load_entry(PLANS_BY_MODE[request.mode])(_with_rungs(request))
        if any(phase.mode == HOPPER for phase in plan.phases):
            refuse_conflicts(ensemble.name, HOPS, launch=site.launch)
        return plan
    if len(ensemble.trials) > MOST_TRIALS:
        request = _with_rungs(request)
    members = request.workloads()
    searches: Sequence[SimulatedSearch] = ()
    if request.begins_search and len(ensemble.trials) <= MOST_TRIALS:
        # Imported here since most ensembles have no search.
        from hetctl.app.simulated_search import simulated_searches

        searches = simulated_searches(request.trainable, members, request.gpus, options.seed)
    return data_parallel_plan(request, members, options, searches)


def _with_rungs(request: PlanRequest) -> PlanRequest:
    """Return a request in which trials have the epochs that a new run's search is likely to train of them."""
    search, ensemble = request.likely_search, request.ensemble
    if search is None:
        return request
    # A trial that is not likely to begin may do so all the same, and needs a pipeline then.
    least = 1 if request.mode in (AUTO, PIPELINE) else 0
    epochs = {name: max(least, search.epochs(name)) for name in ensemble.trials}
    searched = (
        replace(member, stop=replace(member.stop, expected_epochs=epochs[member.name]))
        if member.name in epochs
        else member
        for member in ensemble.members
        if epochs.get(member.name, 1)
    )
    changed = replace(request, ensemble=replace(ensemble, members=tuple(searched)))
    # The search was drawn with all of its trials, of which some may be missing now.
    vars(changed)["likely_search"] = search
    return changed
