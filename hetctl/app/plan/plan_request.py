"""Input of plans in all modes, and data-parallel plans, which the other modes are compared with."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hetctl import __version__
from hetctl.cluster.launchers import LAUNCHERS
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.job import JobSize
from hetctl.model.plan import DATA_PARALLEL, USUAL_PLANNER, Plan
from hetctl.model.profile import LayerPoint, MemberProfile
from hetctl.model.run import CACHED, LOCKSTEP
from hetctl.model.serialization import encode
from hetctl.model.site import MEMBERS, Cluster, Site
from hetctl.model.training_progress import Progress
from hetctl.model.training_settings import OFF
from hetctl.model.workload import Workload
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Options, Planner, options_from
from hetctl.scheduling.simulate.forecast import forecast
from hetctl.scheduling.simulate.scenario import Arrival, JobTiming, Scenario
from hetctl.scheduling.simulate.simulate_run import PlannerChoice, choose

AUTO = "auto"
"""Name for the planner with the best simulation, or for the mode that suits a member."""
ROUND_OVERHEAD_S = 0.5
"""Seconds from the end of one round to the launch of the next, in the same job."""
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
    predict_rates : bool
        True to predict the rates of members whose shape was not measured.
    profiles : mapping of str to MemberProfile
        Profiles by member, those that are predicted among them; members that fit no GPU may have none.
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
    predict_rates: bool = False
    profiles: Mapping[str, MemberProfile] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise BadInputError on an unknown planner or wrong option before any file is opened."""
        check_planner(self.planner, self.options)

    @property
    def digest(self) -> str:
        """Digest of the input, this version of hetctl included."""
        # Explanations do not change a plan; another version of hetctl may.
        inputs = [__version__, encode(replace(self, explain=False))]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()

    @cached_property
    def planner_options(self) -> Options:
        """Options of the planner, those that were not given included."""
        return options_from(self.options)

    @cached_property
    def scenario(self) -> Scenario:
        """Jobs in which the plan is carried out."""
        size = self.size
        timing = JobTiming(size.wall_s, size.grace_s, ROUND_OVERHEAD_S, JOB_OVERHEAD_S)
        return Scenario(Cluster.at(self.site, size.gpus), timing, lockstep=self.sharing == LOCKSTEP)

    @property
    def gpus(self) -> int:
        """Number of GPUs of a job."""
        return self.scenario.cluster.gpus

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


def data_parallel_plan(request: PlanRequest, members: Sequence[Workload], options: Options) -> Plan:
    """Return the plan of members for data-parallel training.

    Raises
    ------
    BadInputError
        If the planner does not support the requested sharing.
    """
    scenario = request.scenario
    choice = chosen(request.planner, [Arrival(member) for member in members], scenario, options)
    refuse_lockstep(choice.planner, scenario)
    _refuse_unknown_nodes(request)
    plan = forecast(choice.planner, members, scenario, options, explain=request.explain)
    gains = {} if options.balance == OFF else _balance_gains(plan, members, scenario.cluster)
    return replace(plan, reason=choice.reason, balance_gains=gains)


def refuse_lockstep(planner: Planner, scenario: Scenario) -> None:
    """Raise BadInputError if members are to train in lockstep, and the planner forms no flotillas."""
    if scenario.lockstep and not planner.shares:
        raise BadInputError(
            f"planner {planner.name} forms no flotillas, which lockstep needs",
            "choose --planner flotilla or flotilla-local, or --sharing cached",
        )


def _balance_gains(plan: Plan, members: Sequence[Workload], cluster: Cluster) -> dict[str, float]:
    """Return what balanced batches gain each member on the first several types of GPU that it has at once."""
    types = {node.name: node.gpu_type or "" for node in cluster.nodes}
    workloads = {member.name: member for member in members}
    gains: dict[str, float] = {}
    for given in (allocation for planned in plan.rounds for allocation in planned.allocations):
        gpus = Counter[str]()
        for part in given.placement:
            gpus[types[part.node]] += len(part.gpus)
        workload, count = workloads[given.member], given.gpus
        # A type on which the member was not measured counts as one that was, and would hide the gain.
        if len(gpus) > 1 and gpus.keys() <= workload.rates_by_type.keys() and given.member not in gains:
            equal = workload.on_slowest(gpus).rates[count]
            gains[given.member] = workload.on_balanced(gpus).rates[count] / equal
    return gains


def _refuse_unknown_nodes(request: PlanRequest) -> None:
    """Refuse lockstep, in which members of a node share a stream, if the launcher chooses members' nodes."""
    site = request.site
    chosen_by_launcher = site.launch == MEMBERS and LAUNCHERS[site.launcher].chooses_nodes
    if request.sharing == LOCKSTEP and chosen_by_launcher and request.size.gpus > site.gpus_per_node:
        raise BadInputError(
            f"with launch: members, {site.launcher} chooses the nodes of each member, and members in lockstep"
            " must know which members share their node",
            "choose --launch nodes, or --sharing cached",
        )


def check_planner(name: str, options: Mapping[str, Any]) -> None:
    """Raise BadInputError if there is no such planner, or an option is wrong."""
    if name != AUTO:
        planner_named(name)
    options_from(options)


def chosen(name: str, arrivals: Sequence[Arrival], scenario: Scenario, options: Options) -> PlannerChoice:
    """Return the planner of that name, or for ``auto`` the best one in simulations."""
    return choose(arrivals, scenario, options) if name == AUTO else PlannerChoice(planner_named(name))
