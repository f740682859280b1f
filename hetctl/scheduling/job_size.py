"""Job planner, hetctl's own: the number of nodes of a job, and its wall-clock time.

More nodes are faster but waste more; longer jobs are fewer but wait longer in a queue. The planner
takes the smallest number of nodes that is nearly as fast as any without much waste, and the time that
the work needs with some slack, in as few jobs as the queue's limit permits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hetctl.model.errors import InfeasibleError
from hetctl.model.job import JobSize, JobSizeOption
from hetctl.model.run import Budget
from hetctl.model.site import Queue, Site
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload
from hetctl.perf.bounds import least_s, makespan_bound

FAST_ENOUGH = 1.05
"""Largest ratio of makespan to the least makespan."""
WASTE = 2.0
"""Largest ratio of GPU-hours to the fewest GPU-hours."""
SLACK = 1.5
"""Ratio of the requested time to the predicted time of the work."""
LEAST_WALL_S, WALL_STEP_S = 1800, 300
UNLIMITED_WALL_S = 24 * 3600
"""Largest requested time in seconds if the queue has no limit."""
SHORTEST_GRACE_S, LONGEST_GRACE_S, GRACE_SHARE = 10, 300, 0.05


@dataclass(frozen=True)
class QueueBin:
    """Limits of a queue for jobs in a range of numbers of nodes."""

    queue: Queue
    least_nodes: int
    most_nodes: int

    def takes(self, nodes: int, wall_s: int) -> bool:
        """Return true if a job of that size may be submitted."""
        return self.least_nodes <= nodes <= self.most_nodes and wall_s <= (self.queue.max_wall_s or wall_s)


def bins_of(site: Site, queues: Sequence[Queue]) -> list[QueueBin]:
    """Return the bins of queues; several entries of one name go from few nodes to many."""
    bins: list[QueueBin] = []
    for queue in queues:
        below = [b.most_nodes for b in bins if b.queue.name == queue.name]
        least = max(queue.min_nodes or 1, max(below, default=0) + 1)
        bins.append(QueueBin(queue, least, min(queue.max_nodes or site.nodes, site.nodes)))
    return [b for b in bins if b.least_nodes <= b.most_nodes]


def grace_of(wall_s: int) -> int:
    """Return how many seconds before its limit a job's trainers checkpoint."""
    return max(SHORTEST_GRACE_S, min(LONGEST_GRACE_S, round(GRACE_SHARE * wall_s)))


def job_sizes(
    site: Site,
    bins: Sequence[QueueBin],
    members: Sequence[Workload],
    gpus: int | None = None,
    wall_s: int | None = None,
    before: Mapping[str, float] = MappingProxyType({}),
) -> list[JobSizeOption]:
    """Return the predicted outcome of each size, by rising numbers of nodes.

    Parameters
    ----------
    gpus, wall_s : int or None
        Values that the user set; None leaves them to the planner.
    before : mapping of str to float
        Samples that have to be trained before a member begins, as of the parent of a trial.

    Raises
    ------
    InfeasibleError
        If no bin has a job long enough for a member to start.
    """
    found = [
        option
        for b in bins
        for nodes in _node_counts(site, b, members, gpus)
        if (option := _option_of(site, b, nodes, members, gpus, wall_s, before))
    ]
    if not found:
        slowest = max(members, key=lambda member: member.startup_s)
        raise InfeasibleError(
            f"no job of site {site.name} is long enough for the start of {slowest.name}"
            f" ({slowest.startup_s:.0f} s) and the grace",
            "choose another queue with --queue, or ask for more with --time",
        )
    return sorted(found, key=lambda p: (p.size.nodes, p.makespan_s))


def best_of(found: Sequence[JobSizeOption], budget: Budget) -> JobSizeOption:
    """Return the smallest of the nearly fastest sizes that waste little and keep the budget.

    If none keeps the budget, return the one with the fewest GPU-hours: the run then stops at the limit.
    """
    gpu_hours, jobs = budget.gpu_hours or math.inf, budget.max_jobs or math.inf
    node_hours = budget.node_hours or math.inf
    allowed = [p for p in found if p.gpu_hours <= gpu_hours and p.node_hours <= node_hours and p.jobs <= jobs]
    if not allowed:
        return min(found, key=lambda p: p.gpu_hours)
    fewest = min(p.gpu_hours for p in found)
    efficient = [p for p in allowed if p.gpu_hours <= WASTE * fewest] or allowed
    least_s = min(p.makespan_s for p in efficient)
    return next(p for p in efficient if p.makespan_s <= FAST_ENOUGH * least_s)


def _node_counts(site: Site, b: QueueBin, members: Sequence[Workload], gpus: int | None) -> list[int]:
    """Return powers of two and the bin's ends, up to the most GPUs that the members could use."""
    if gpus is not None:
        nodes = -(-gpus // site.gpus_per_node)
        return [nodes] if b.least_nodes <= nodes <= b.most_nodes else []
    useful = -(-sum(max(member.highest_rates) for member in members) // site.gpus_per_node)
    powers = {2**exponent for exponent in range(b.most_nodes.bit_length())}
    counts = {n for n in {*powers, b.most_nodes, useful} if b.least_nodes <= n <= min(b.most_nodes, useful)}
    return sorted({*counts, b.least_nodes})


def _option_of(
    site: Site,
    b: QueueBin,
    nodes: int,
    members: Sequence[Workload],
    gpus: int | None,
    wall_s: int | None,
    before: Mapping[str, float],
) -> JobSizeOption | None:
    """Return the predicted outcome of jobs of a number of nodes; None if no member can train in them."""
    held = gpus or nodes * site.gpus_per_node
    if any(member.min_gpus > held for member in members):
        return None
    start_s = max((member.startup_s for member in members), default=0.0)
    begins_s = (least_s(member.with_left(before.get(member.name, 0.0)), held) for member in members)
    bound_s = makespan_bound(list(zip(begins_s, members, strict=True)), held)
    makespan_s = bound_s + sum(member.startup_s for member in members) / held
    longest_s = wall_s or b.queue.max_wall_s or UNLIMITED_WALL_S
    usable_s = longest_s - grace_of(longest_s) - start_s
    if usable_s <= 0 or not b.takes(nodes, longest_s):
        return None
    jobs = max(1, math.ceil(makespan_s / usable_s))
    # The grace depends on the time that is being chosen, so the longest one is assumed.
    wanted_s = SLACK * makespan_s / jobs + start_s + LONGEST_GRACE_S
    asked_s = wall_s or min(longest_s, max(LEAST_WALL_S, math.ceil(wanted_s / WALL_STEP_S) * WALL_STEP_S))
    size = JobSize(b.queue, held, nodes, asked_s, grace_of(asked_s))
    return JobSizeOption(size, jobs, makespan_s, held * makespan_s / 3600)
