"""Plan for pipelines: the virtual workers of a policy or the best ones, by a search, and their bounds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.pipeline.grouping import (
    GROUPINGS,
    MOST_SETS,
    Grouping,
    all_cells,
    exact_groupings,
    improved,
)
from hetctl.methods.pipeline.partition import Cut, Partitioner
from hetctl.methods.pipeline.stage_costs import (
    Group,
    LayerProfile,
    PipelineCluster,
    StageCosts,
    least_bytes,
    most_in_flight,
)
from hetctl.methods.pipeline.stages import VirtualWorker, virtual_worker
from hetctl.methods.pipeline.throughput import (
    SAME,
    Pipeline,
    PipelineRun,
    common_period_s,
    least_period_s,
    simulate_pipelines,
    sufficient_depth,
)
from hetctl.methods.pipeline.transfers import Traffic, Waves, at_once_s, traffic_of
from hetctl.methods.pipeline.wsp import Bounds
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.pipelines import Stage
from hetctl.model.values import dataclass
from hetctl.scheduling.planners.base import nearest

BEST = "best"
POLICIES = (*GROUPINGS, BEST)

SET_S, ELEMENT_S = 5e-4, 1.5e-8
"""Approximate seconds for the bottleneck of a set of GPUs, and for each pair of layers in it."""
OWN_SHARE = 0.5
"""Least share of the search time that is reserved for groupings other than the paper's."""
DEPTHS = 4
"""Most minibatches in flight per stage of a virtual worker; more than necessary, for longer waves."""
NEAR = 0.99
"""Share of the highest throughput that the fewest minibatches in flight have to reach."""
DEPTH_PRECISION = 8
"""Precision of that number: up to an eighth more than the fewest minibatches may be taken."""
LEAST_WAVES, MINIBATCHES = 32, 4000
"""Waves of each virtual worker in the steady state, or fewer that contain this number of minibatches. The
waves until the clock distance is used up are added."""


def plan(
    layers: LayerProfile,
    cluster: PipelineCluster,
    policy: str = BEST,
    options: PipelineOptions | None = None,
) -> PipelinePlan:
    """Group the GPUs by a policy and partition the layers over each virtual worker.

    Raises
    ------
    BadInputError
        If the policy is unknown, fewer than one minibatch is in flight, or the layers were not measured on a
        GPU type of the cluster.
    InfeasibleError
        If the network does not fit into the GPUs' memory.
    """
    options = options or PipelineOptions()
    if policy not in POLICIES:
        raise BadInputError(f"unknown policy {policy!r}", hint=nearest(policy, dict.fromkeys(POLICIES)))
    if options.in_flight is not None and options.in_flight < 1:
        raise BadInputError(f"{options.in_flight} minibatches in flight, but there must be at least 1")
    if lacking := set(cluster.gpu_types) - layers.gpu_types:
        raise BadInputError(f"the layers have no times on GPU type {', '.join(sorted(lacking))}")
    search = Search(layers, cluster, options)
    found = search.best() if policy == BEST else search.fastest_of(GROUPINGS[policy](layers, cluster))
    return replace(found, policy=policy, lower_bound_s=search.lower_bound_s(found.grouping))


@dataclass(frozen=True)
class PipelineOptions:
    """Options of the search.

    Parameters
    ----------
    in_flight : int or None
        Minibatches in flight in each virtual worker; None for the number with the highest throughput.
    seconds : float
        Approximate time limit of `best` for groupings of its own.
    waves : Waves
        Synchronisation of virtual workers.
    recompute : bool
        True if stages that lack memory for the data of backward passes may compute forward passes again.
    """

    in_flight: int | None = None
    seconds: float = 2.0
    waves: Waves = field(default_factory=Waves)
    recompute: bool = True
    clock: Callable[[], float] = time.monotonic


class Search:
    """A search on one network and cluster, with cached intermediate results."""

    def __init__(self, layers: LayerProfile, cluster: PipelineCluster, options: PipelineOptions) -> None:
        self._layers, self._cluster, self._options = layers, cluster, options
        self._evaluator = GroupingEvaluator(layers, cluster, options.waves, recompute=options.recompute)
        self._stop_s = options.clock() + options.seconds

    def lower_bound_s(self, grouping: Grouping) -> float:
        """Return the highest of the lower bounds of the virtual workers' bottlenecks, in seconds."""
        kinds = {tuple(sorted(map(self._cluster.type_of, group))) for group in grouping}
        return max(lower_bound_s(self._layers, kind, self._cluster.free_bytes) for kind in kinds)

    def fastest_of(self, grouping: Grouping) -> PipelinePlan:
        """Return the virtual workers of a grouping.

        Raises
        ------
        InfeasibleError
            If the network does not fit into the memory of a virtual worker.
        """
        if self._options.in_flight is not None:
            return self._evaluator.evaluate(grouping, self._options.in_flight)
        return _fastest_number(self._evaluator, grouping)

    def best(self) -> PipelinePlan:
        """Return the fastest of the paper's policies and other groupings.

        Raises
        ------
        InfeasibleError
            If the network does not even fit into the memory of all GPUs together.
        """
        papers = self._paper_policies()
        self._stop_s = max(self._stop_s, self._options.clock() + OWN_SHARE * self._options.seconds)
        found = [*papers, *self._other_groupings(papers)]
        if not found:
            return self.fastest_of((self._cluster.gpus,))
        fastest = _fastest(found)
        return _fastest([fastest, self._improved(fastest)])

    def _paper_policies(self) -> list[PipelinePlan]:
        """Return the paper's policies that may be the fastest, those with short pipelines first."""
        groupings = [make(self._layers, self._cluster) for make in GROUPINGS.values()]
        found: list[PipelinePlan] = []
        # With one minibatch in flight stages need the least memory: no other number is faster.
        least_s = self._evaluator.bottleneck_s(1)
        for grouping in sorted(groupings, key=lambda grouping: max(map(len, grouping))):
            if not found or len(grouping) / max(map(least_s, grouping)) > _fastest(found).throughput:
                with suppress(InfeasibleError):
                    found.append(self.fastest_of(grouping))
        return found

    def _other_groupings(self, known: Sequence[PipelinePlan]) -> Iterator[PipelinePlan]:
        """Yield other groupings than the paper's, those of small cells first, while time is left.

        Time for half of the sets of GPUs is enough, since small sets come first.
        """
        effort_s = SET_S + ELEMENT_S * len(self._layers.layers) ** 2
        left_s = self._stop_s - self._options.clock()
        most_sets = min(MOST_SETS, int(2 * left_s / effort_s))
        found = list(known)
        for cells in all_cells(self._cluster, most_sets):
            most = most_in_flight(len(cells[0]))
            first = min(_fastest(found).in_flight, most) if found else most
            for grouping in self._in_cells(cells, first):
                found.append(grouping)
                yield grouping
            if self._is_late():
                return

    def _in_cells(self, cells: Grouping, first: int) -> Iterator[PipelinePlan]:
        """Yield groupings for `first` minibatches in flight, then for all other useful numbers.

        More minibatches leave less memory for layers, hence fewer partitions. A number is not tried if it
        would not be faster even with the bottlenecks of a smaller number.
        """
        given = self._options.in_flight
        numbers: Sequence[int] = (first, 1, *_numbers(most_in_flight(len(cells[0])) + 1))
        fastest = 0.0
        for at, number in enumerate(numbers if given is None else (given,)):
            ceiling = 0.0
            bottleneck_s = self._evaluator.bottleneck_s(number)
            for grouping in exact_groupings(self._cluster, cells, bottleneck_s, self._is_late):
                limit = len(grouping) / max(map(bottleneck_s, grouping))
                ceiling = max(ceiling, limit)
                if limit > fastest:
                    found = self._evaluator.evaluate(grouping, number)
                    deepened = self._evaluator.with_best_depth(found) if given is None else found
                    fastest = max(fastest, deepened.throughput)
                    yield deepened
            if (at and ceiling <= fastest * (1 + SAME)) or self._is_late():
                return

    def _improved(self, found: PipelinePlan) -> PipelinePlan:
        """Return a grouping that is no slower with the same number of minibatches in flight."""
        bottleneck_s = self._evaluator.bottleneck_s(found.in_flight)

        def rate(grouping: Grouping) -> float:
            with suppress(InfeasibleError):
                return self._evaluator.evaluate(grouping, found.in_flight).ceiling
            return 0.0

        grouping = improved(self._cluster, found.grouping, bottleneck_s, self._is_late, rate)
        with suppress(InfeasibleError):
            return self.fastest_of(grouping) if grouping != found.grouping else found
        return found

    def _is_late(self) -> bool:
        return self._options.clock() >= self._stop_s


def _fastest_number(evaluator: GroupingEvaluator, grouping: Grouping) -> PipelinePlan:
    """Return the fastest result over all numbers of minibatches in flight, with the fewest possible.

    More minibatches leave less memory for layers. The most come first: if the slowest stage is as fast with
    them as with one, no others are tried. The search ends when the slowest stage is busy or memory is full,
    and skips some of the high numbers.
    """
    fastest = evaluator.with_best_depth(evaluator.evaluate(grouping, 1))
    alone_s = fastest.bottleneck_s
    most = most_in_flight(max(map(len, grouping)))
    for number in (most, *_numbers(most)):
        try:
            found = evaluator.evaluate(grouping, number)
        except InfeasibleError:
            if number < most:
                break
            continue
        if found.bottleneck_s < fastest.period_s:
            fastest = _fastest([fastest, evaluator.with_best_depth(found)])
        same = number == most and found.bottleneck_s <= alone_s * (1 + SAME)
        least_s = alone_s if number == most else found.bottleneck_s
        if same or fastest.period_s <= least_s * (1 + SAME):
            break
    return fastest


def _numbers(most: int) -> Iterator[int]:
    """Yield 2, 3, .. below `most`, with growing steps."""
    number = 2
    while number < most:
        yield number
        number += max(1, number // 4)


def _fastest(found: Sequence[PipelinePlan]) -> PipelinePlan:
    return max(found, key=lambda one: one.throughput)


def lower_bound_s(profile: LayerProfile, gpu_types: Sequence[str], memory_bytes: Mapping[str, int]) -> float:
    """Return tau, the least time in seconds of the slowest GPU with fractional layers and free transfers.

    min tau : sum_g x_lg = 1, sum_l c_lg x_lg <= tau, sum_l mem_l x_lg <= cap_g, x >= 0. GPUs of one type
    share their variables, since by symmetry there is an optimum in which these are equal.

    Parameters
    ----------
    gpu_types : sequence of str
        Type of each GPU of the group.

    Returns
    -------
    float
        The bound; infinite if the layers do not fit.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, eye_array, hstack

    counts = Counter(gpu_types)
    kinds, layers = sorted(counts), len(profile.layers)
    needed = least_bytes(profile)
    # Scaled to about 1, since the solver's tolerances are absolute and bytes exceed seconds by far.
    most_bytes, most_s = max(1, int(needed.sum())), max(_seconds(profile, kind).sum() for kind in kinds)
    rows = []
    limits = []
    for number, kind in enumerate(kinds):
        seconds = np.zeros(len(kinds) * layers + 1)
        columns = slice(number * layers, (number + 1) * layers)
        seconds[columns] = _seconds(profile, kind) / most_s
        seconds[-1] = -counts[kind]
        used_bytes = np.zeros_like(seconds)
        used_bytes[columns] = needed / most_bytes
        rows += [seconds, used_bytes]
        limits += [0.0, counts[kind] * memory_bytes[kind] / most_bytes]
    whole = hstack([*[eye_array(layers)] * len(kinds), csr_array((layers, 1))], format="csr")
    goal = np.zeros(len(kinds) * layers + 1)
    goal[-1] = 1.0
    found = linprog(goal, csr_array(np.array(rows)), np.array(limits), whole, np.ones(layers), method="highs")
    return float(found.fun * most_s) if found.status == 0 else float(np.inf)


def _seconds(profile: LayerProfile, gpu_type: str) -> NDArray[np.float64]:
    return profile.forward_s(gpu_type) + profile.backward_s(gpu_type)


@dataclass(frozen=True)
class PipelinePlan:
    """Virtual workers that train one network together.

    Parameters
    ----------
    traffic : tuple of Traffic
        Transfers of each virtual worker.
    distance : int
        Clock distance D.
    policy : str
        Policy that chose the grouping, one of `pipeline_plan.POLICIES`.
    lower_bound_s : float
        Lower bound of the slowest stage's time, over all partitions over the GPUs of these virtual workers.
    """

    grouping: Grouping
    virtual_workers: tuple[VirtualWorker, ...]
    traffic: tuple[Traffic, ...]
    distance: int
    policy: str = ""
    lower_bound_s: float = 0.0

    @property
    def in_flight(self) -> int:
        """Number of minibatches in flight in each virtual worker."""
        return self.virtual_workers[0].in_flight

    @property
    def bottleneck_s(self) -> float:
        """Seconds of the slowest stage of all virtual workers."""
        return max(worker.bottleneck_s for worker in self.virtual_workers)

    @cached_property
    def synchronisation_s(self) -> float:
        """Time to send a wave to the parameter servers and add it, if all virtual workers send at once."""
        return at_once_s([one.push for one in self.traffic])

    @cached_property
    def period_s(self) -> float:
        """Seconds between the minibatches of the slowest virtual worker."""
        return common_period_s(self.pipelines, self.in_flight, self.distance)

    @property
    def throughput(self) -> float:
        """Minibatches/s of all virtual workers, each as fast as the slowest one."""
        return len(self.virtual_workers) / self.period_s

    @cached_property
    def ceiling(self) -> float:
        """Upper bound of the throughput, faster to compute than the throughput itself."""
        least_s = least_period_s(self.pipelines, self.in_flight, self.distance)
        return len(self.virtual_workers) / least_s

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Passes and transfers of each virtual worker."""
        passes = (worker.passes for worker in self.virtual_workers)
        return tuple(map(Pipeline, passes, self.traffic))

    @property
    def steady_waves(self) -> int:
        """Number of waves of each virtual worker that is enough to show the throughput."""
        return max(2, min(LEAST_WAVES, MINIBATCHES // self.in_flight)) + 4 * self.distance

    def simulated(self, waves: int) -> PipelineRun:
        """Simulate it until each virtual worker has completed `waves` waves, at least 2."""
        return simulate_pipelines(self.pipelines, Bounds(self.in_flight, self.distance), waves)

    @property
    def stages(self) -> list[Stage]:
        """Stages of all virtual workers."""
        return [stage for worker in self.virtual_workers for stage in worker.stages]


class GroupingEvaluator:
    """Builder of virtual workers from a network's layers; partitions are cached.

    Parameters
    ----------
    recompute : bool
        As in `StageCosts`.
    """

    def __init__(
        self, layers: LayerProfile, cluster: PipelineCluster, waves: Waves, *, recompute: bool = True
    ) -> None:
        self._layers, self._cluster, self._waves = layers, cluster, waves
        self._costs = StageCosts(layers, cluster, recompute=recompute)
        self._partitioner = cache(lambda in_flight: Partitioner(self._costs, cluster, in_flight))
        self._partition = cache(lambda group, in_flight: self._partitioner(in_flight).partition(group))

    def bottleneck_s(self, in_flight: int) -> Callable[[Group], float]:
        """Return a function from a group to the seconds of the slowest stage of its best partition."""
        return self._partitioner(in_flight).bottleneck_s

    def evaluate(self, grouping: Grouping, in_flight: int) -> PipelinePlan:
        """Return the best partitions for a number of minibatches in flight.

        Raises
        ------
        InfeasibleError
            If the layers do not fit into the memory of one of the groups.
        """
        return self._of_cuts(grouping, [self._partition(group, in_flight) for group in grouping], in_flight)

    def with_best_depth(self, evaluated: PipelinePlan) -> PipelinePlan:
        """Return the same partitions with the fewest minibatches in flight that keep the throughput.

        That may be more than before, within memory: waves are then longer, and fewer are sent. The number is
        bisected, although fewer may be faster than more, as tasks run first come, first served.
        """
        deepest = self._deepest(evaluated)
        distinct = {worker.passes for worker in evaluated.virtual_workers}
        sync_s, distance = evaluated.synchronisation_s, evaluated.distance
        needed = max(sufficient_depth(passes, sync_s, distance) for passes in distinct)
        top = self._with(evaluated, min(deepest, max(evaluated.in_flight, needed)))
        if top.throughput < NEAR * len(top.grouping) / top.bottleneck_s:
            top = max(top, self._with(evaluated, deepest), key=lambda one: one.throughput)
        low, wanted = 1, NEAR * top.throughput
        while top.in_flight - low > top.in_flight // DEPTH_PRECISION:
            trial = self._with(evaluated, (low + top.in_flight) // 2)
            if trial.ceiling >= wanted and trial.throughput >= wanted:
                top = trial
            else:
                low = trial.in_flight + 1
        return top

    def _with(self, evaluated: PipelinePlan, in_flight: int) -> PipelinePlan:
        """Return the same partitions with another number of minibatches in flight."""
        if in_flight == evaluated.in_flight:
            return evaluated
        return self._of_cuts(evaluated.grouping, _cuts_of(evaluated), in_flight)

    def _deepest(self, evaluated: PipelinePlan) -> int:
        """Return the most minibatches in flight that fit into memory, Max_m in section 4.

        No stage begins to recompute for them.
        """
        cuts = _cuts_of(evaluated)
        most = max(evaluated.in_flight, DEPTHS * max(map(len, cuts)))

        def fits(in_flight: int) -> bool:
            stages = (stage for worker in self._workers(cuts, in_flight) for stage in worker.stages)
            return all(
                stage.bytes <= stage.memory_bytes and stage.recomputes <= before.recomputes
                for stage, before in zip(stages, evaluated.stages, strict=True)
            )

        numbers = range(evaluated.in_flight + 1, most + 1)
        return next((number - 1 for number in numbers if not fits(number)), most)

    def _of_cuts(self, grouping: Grouping, cuts: Sequence[Sequence[Cut]], in_flight: int) -> PipelinePlan:
        workers = self._workers(cuts, in_flight)
        traffic = traffic_of(workers, self._layers, self._cluster, self._waves.ps_placement)
        return PipelinePlan(grouping, workers, traffic, self._waves.distance)

    def _workers(self, cuts: Sequence[Sequence[Cut]], in_flight: int) -> tuple[VirtualWorker, ...]:
        layers, cluster, costs = self._layers, self._cluster, self._costs
        return tuple(virtual_worker(layers, cluster, costs, of_one, in_flight) for of_one in cuts)


def _cuts_of(evaluated: PipelinePlan) -> list[list[Cut]]:
    return [[Cut(s.first, s.last, (s.node, s.gpu)) for s in w.stages] for w in evaluated.virtual_workers]
