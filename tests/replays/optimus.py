"""Optimus (Peng et al., EuroSys 2018) with all-reduce: it fits speeds, and adds workers where they gain most.

Sample runs before the training measure each network on a few numbers of workers. Speeds in training are added
to them as they are seen. The time of a step is fitted by non-negative least squares (section 3.2): without
parameter servers, its terms are in proportion to 1/w, constant, and in proportion to w. Residuals count
relative to the times, which the paper does not say. The fit of losses (section 3.1) is left out: here the
work left is known.

Every `INTERVAL_S` the workers are distributed anew (section 4.1): one for each network, then one more for the
network whose time it shortens most, until no time gets shorter. In between, networks that wait begin with
a worker as soon as there is a free one.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Decision, Planner, Request, gpus_after
from hetctl.scheduling.planners.doubling import ResizeCandidate, candidates_of, movable_nodes
from hetctl.scheduling.planners.placement import NodeCapacity, place_members
from hetctl.scheduling.simulate.rate_learner import RATE_KNOWN_S

INTERVAL_S = 600.0
"""Seconds between two distributions of the workers, the paper's ten minutes."""
SAMPLED = (1, 2, 4, 8)
"""Numbers of workers of the sample runs."""


def fitted(samples: Mapping[int, float], counts: Sequence[int]) -> dict[int, float]:
    """Return the samples/s on numbers of workers by those on a few."""
    workers, times = np.array(list(samples)), 1 / np.array(list(samples.values()))
    factors, _ = nnls(_terms(workers) / times[:, None], np.ones(len(times)))
    return dict(zip(counts, (1 / (_terms(np.array(counts)) @ factors)).tolist(), strict=True))


def _terms(workers: np.ndarray) -> np.ndarray:
    return np.stack([1 / workers, np.ones(len(workers)), workers], axis=1)


class SpeedModels:
    """Speeds as Optimus knows them, in place of a `RateLearner`."""

    known_s = RATE_KNOWN_S

    def __init__(self, workloads: Sequence[Workload]) -> None:
        self._samples = {w.name: {m: w.rates[m] for m in sampled(w)} for w in workloads}
        self._rates: dict[str, Mapping[int, float]] = {}

    def seen(self, workload: Workload) -> Workload:
        """Return a network with the speeds that the fit predicts in place of its true ones."""
        name = workload.name
        if name not in self._rates:
            self._rates[name] = fitted(self._samples[name], list(workload.rates))
        return replace(workload, rates=self._rates[name])

    def report(self, member: str, gpus: int, rate: float, _busy: float | None = None) -> None:
        """Add a speed that was seen in training."""
        self._samples[member][gpus] = rate
        self._rates.pop(member, None)


def sampled(workload: Workload) -> list[int]:
    """Return the numbers of workers of a network's sample runs."""
    return [workers for workers in SAMPLED if workers in workload.rates]


def decide(request: Request) -> Decision:
    """Distribute the workers anew if that is due, or else only the free ones among the networks that wait."""
    due_s = (request.planner_state or {}).get("due_s", 0.0)
    candidates = candidates_of(request)
    is_due = request.now_s >= due_s
    if not is_due:
        candidates = [replace(one, fixed=one.fixed or one.holds > 0) for one in candidates]
        request = replace(request, held=tuple(replace(held, fixed=True) for held in request.held))
    counts = distributed(candidates, NodeCapacity(movable_nodes(request)), grow=is_due)
    decision, _ = place_members(request, counts)
    due_s = request.now_s + INTERVAL_S if is_due else due_s
    replan_at_s = due_s if gpus_after(request, decision) else None
    return replace(decision, replan_at_s=replan_at_s, planner_state={"due_s": due_s})


def distributed(
    candidates: Sequence[ResizeCandidate], capacity: NodeCapacity, *, grow: bool = True
) -> dict[str, int]:
    """Return the workers of each network: one, first come, first served, then those that gain most."""
    movable = [one for one in candidates if not one.fixed and capacity.left and capacity.change(0, one.least)]
    counts = {one.name: one.least for one in movable}

    def following(order: int) -> list[tuple[float, int]]:
        one = movable[order]
        before = counts[one.name]
        gain = one.gain(before, before + 1) if before + 1 in one.rates else 0.0
        return [(-gain, order)] if gain > 0 else []

    gains = [entry for order in range(len(movable) * grow) for entry in following(order)]
    heapq.heapify(gains)
    while gains and capacity.left:
        _, order = heapq.heappop(gains)
        name = movable[order].name
        if capacity.change(counts[name], counts[name] + 1):
            counts[name] += 1
            for entry in following(order):
                heapq.heappush(gains, entry)
    return counts


OPTIMUS = Planner("optimus", "elastic", decide)
