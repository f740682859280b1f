"""Input of planning in several modes; it imports none of their methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hetctl.model.ensemble import Ensemble
from hetctl.model.plan import Plan
from hetctl.model.profile import LayerPoint, MemberProfile
from hetctl.model.site import Site
from hetctl.model.training_progress import Progress
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Options
from hetctl.scheduling.simulate.scenario import Scenario


@dataclass(frozen=True)
class PlanContext:
    """Input of planning in several modes.

    Parameters
    ----------
    profiles : mapping of str to MemberProfile
        Profiles by member; members that fit no GPU may have none.
    planner : str
        Name of the planner.
    data_parallel : callable
        A function that plans workloads for data-parallel training.
    progress : mapping of str to Progress
        Progress of the members, for members that hop.
    layers : mapping
        Measured layers of members that name no layer profile, one measurement for each type of GPU.
    """

    ensemble: Ensemble
    site: Site
    profiles: Mapping[str, MemberProfile]
    scenario: Scenario
    options: Options
    planner: str
    data_parallel: Callable[[Sequence[Workload], Options], Plan]
    progress: Mapping[str, Progress] = field(default_factory=dict)
    layers: Mapping[str, Sequence[LayerPoint]] = field(default_factory=dict)

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
