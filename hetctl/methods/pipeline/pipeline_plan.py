"""Plan for pipelines: the virtual workers of a policy or the best ones, by a search, and their bounds."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.pipeline.evaluate import Evaluated, GroupingEvaluator
from hetctl.methods.pipeline.grouping import (
    GROUPINGS,
    MOST_SETS,
    Grouping,
    all_cells,
    exact_groupings,
    improved,
)
from hetctl.methods.pipeline.stage_costs import (
    LayerProfile,
    PipelineCluster,
    coarse,
    least_bytes,
    most_in_flight,
)
from hetctl.methods.pipeline.stages import VirtualWorker
from hetctl.methods.pipeline.sync_cost import Waves
from hetctl.methods.pipeline.throughput import SAME
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.scheduling.planners.base import nearest

__all__ = ["POLICIES", "PipelineOptions", "PipelinePlan", "VirtualWorker", "Waves", "plan"]

BEST = "best"
POLICIES = (*GROUPINGS, BEST)

SET_S, ELEMENT_S = 5e-4, 1.5e-8
"""Approximate seconds for the bottleneck of a set of GPUs, and for each pair of layers in it."""
COARSE = 1.25
"""Assumed limit of the throughput of a deep network's exact partitions relative to the coarse one's."""
OWN_SHARE = 0.5
"""Least share of the search time that is reserved for groupings other than the paper's."""
MOST_LAYERS = 100
"""Most layers for a direct search; deeper networks are grouped by a coarse one, then partitioned exactly."""


@dataclass(frozen=True)
class PipelinePlan:
    """Virtual workers that train one network together.

    Parameters
    ----------
    bottleneck_s : float
        Seconds of the slowest stage of all virtual workers.
    lower_bound_s : float
        Lower bound of the slowest stage's time, over all partitions over the GPUs of these virtual workers.
    throughput : float
        Minibatches/s of all virtual workers, each as fast as the slowest of them.
    synchronisation_s : float
        Time to send a wave to the parameter servers and add it, if all virtual workers send at once.
    """

    policy: str
    virtual_workers: tuple[VirtualWorker, ...]
    bottleneck_s: float
    lower_bound_s: float
    throughput: float
    synchronisation_s: float = 0.0

    @property
    def in_flight(self) -> int:
        """Number of minibatches in flight in each virtual worker."""
        return self.virtual_workers[0].in_flight


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
    found = search.best() if policy == BEST else search.policy(policy)
    return PipelinePlan(
        policy=policy,
        virtual_workers=found.virtual_workers,
        bottleneck_s=found.bottleneck_s,
        lower_bound_s=search.lower_bound_s(found.grouping),
        throughput=found.throughput,
        synchronisation_s=found.wave_sync.seconds,
    )


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
        Let stages without memory for what the backward pass needs compute the forward pass again.
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
        evaluator = partial(
            GroupingEvaluator, cluster=cluster, waves=options.waves, recompute=options.recompute
        )
        self._exact = self._rough = evaluator(layers)
        if len(layers.layers) > MOST_LAYERS:
            self._rough = evaluator(coarse(layers, MOST_LAYERS))
        self._stop_s = options.clock() + options.seconds

    def lower_bound_s(self, grouping: Grouping) -> float:
        """Return the highest of the lower bounds of the virtual workers' bottlenecks, in seconds."""
        kinds = {tuple(sorted(map(self._cluster.type_of, group))) for group in grouping}
        return max(lower_bound_s(self._layers, kind, self._cluster.free_bytes) for kind in kinds)

    def policy(self, name: str) -> Evaluated:
        """Return the virtual workers of one of the paper's policies.

        Raises
        ------
        InfeasibleError
            If the network does not fit into the memory of a virtual worker.
        """
        return self._of_grouping(GROUPINGS[name](self._layers, self._cluster))

    def best(self) -> Evaluated:
        """Return the fastest of the paper's policies and other groupings.

        All are compared on the coarse network, if there is one. The fastest of them is then partitioned
        exactly, and so are the paper's policies unless they cannot be faster.

        Raises
        ------
        InfeasibleError
            If the network does not even fit into the memory of all GPUs together.
        """
        papers = self._paper_policies()
        self._stop_s = max(self._stop_s, self._options.clock() + OWN_SHARE * self._options.seconds)
        found = [*papers, *self._other_groupings(papers)]
        if not found:
            return self._of_grouping((self._cluster.gpus,))
        fastest = self._exactly(_fastest([_fastest(found), self._improved(_fastest(found))]))
        for one in papers if self._rough is not self._exact else ():
            if one.throughput * COARSE > fastest.throughput:
                fastest = _fastest([fastest, self._exactly(one)])
        return fastest

    def _paper_policies(self) -> list[Evaluated]:
        """Return the paper's policies that may be the fastest, those with short pipelines first."""
        groupings = [make(self._layers, self._cluster) for make in GROUPINGS.values()]
        found: list[Evaluated] = []
        for grouping in sorted(groupings, key=lambda grouping: max(map(len, grouping))):
            if not found or self._limit(grouping) > _fastest(found).throughput:
                with suppress(InfeasibleError):
                    found.append(self._coarsely(grouping))
        return found

    def _limit(self, grouping: Grouping) -> float:
        """Return an upper bound of a grouping's throughput, with one minibatch in flight (least memory)."""
        slowest_s = max(map(self._rough.bottleneck_s(1), grouping))
        if self._rough is self._exact:
            return len(grouping) / slowest_s
        return len(grouping) / slowest_s * COARSE if slowest_s < math.inf else math.inf

    def _of_grouping(self, grouping: Grouping) -> Evaluated:
        return self._exactly(self._coarsely(grouping))

    def _coarsely(self, grouping: Grouping) -> Evaluated:
        """Evaluate a grouping on the coarse network; exactly if its merged layers do not fit."""
        with suppress(InfeasibleError):
            return self._on(self._rough, grouping)
        return self._on(self._exact, grouping)

    def _on(self, evaluator: GroupingEvaluator, grouping: Grouping) -> Evaluated:
        if self._options.in_flight is not None:
            return evaluator.evaluate(grouping, self._options.in_flight)
        return _fastest_number(evaluator, grouping)

    def _exactly(self, found: Evaluated) -> Evaluated:
        """Return the exact partitions of a grouping found on the coarse network."""
        if self._rough is self._exact:
            return found
        exact = self._exact.evaluate(found.grouping, found.in_flight)
        return self._exact.with_best_depth(exact) if self._options.in_flight is None else exact

    def _other_groupings(self, known: Sequence[Evaluated]) -> Iterator[Evaluated]:
        """Yield other groupings than the paper's, those of small cells first, while time is left.

        Time for half of the sets of GPUs is enough, since small sets come first.
        """
        effort_s = SET_S + ELEMENT_S * self._rough.layers**2
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

    def _in_cells(self, cells: Grouping, first: int) -> Iterator[Evaluated]:
        """Yield groupings for `first` minibatches in flight, then for all other useful numbers.

        More minibatches leave less memory for layers, hence fewer partitions. A number is not tried if it
        would not be faster even with the bottlenecks of a smaller number.
        """
        given = self._options.in_flight
        numbers: Sequence[int] = (first, 1, *_numbers(most_in_flight(len(cells[0])) + 1))
        fastest = 0.0
        for at, number in enumerate(numbers if given is None else (given,)):
            ceiling = 0.0
            bottleneck_s = self._rough.bottleneck_s(number)
            for grouping in exact_groupings(self._cluster, cells, bottleneck_s, self._is_late):
                limit = len(grouping) / max(map(bottleneck_s, grouping))
                ceiling = max(ceiling, limit)
                if limit > fastest:
                    found = self._rough.evaluate(grouping, number)
                    deepened = self._rough.with_best_depth(found) if given is None else found
                    fastest = max(fastest, deepened.throughput)
                    yield deepened
            if (at and ceiling <= fastest * (1 + SAME)) or self._is_late():
                return

    def _improved(self, found: Evaluated) -> Evaluated:
        """Return a grouping that is no slower with the same number of minibatches in flight."""
        bottleneck_s = self._rough.bottleneck_s(found.in_flight)

        def rate(grouping: Grouping) -> float:
            with suppress(InfeasibleError):
                return self._rough.evaluate(grouping, found.in_flight).ceiling
            return 0.0

        grouping = improved(self._cluster, found.grouping, bottleneck_s, self._is_late, rate)
        with suppress(InfeasibleError):
            return self._on(self._rough, grouping) if grouping != found.grouping else found
        return found

    def _is_late(self) -> bool:
        return self._options.clock() >= self._stop_s


def _fastest_number(evaluator: GroupingEvaluator, grouping: Grouping) -> Evaluated:
    """Return the fastest result over all numbers of minibatches in flight, with the fewest possible.

    More minibatches leave less memory for layers. If the slowest stage is as fast with the most as with one,
    the most are sufficient. No more are tried than keep the slowest stage busy or fit into memory. Of
    high numbers only some are tried.
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


def _fastest(found: Sequence[Evaluated]) -> Evaluated:
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
