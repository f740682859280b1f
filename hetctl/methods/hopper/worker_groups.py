"""Groups of GPUs that train a member together where GPUs are left over (CEREBRO, appendix 12).

In the paper each worker of a group has a partition of its own. Here a group's GPUs are on one node and train
on the same partition, so that members visit as many partitions as without groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from hetctl.methods.hopper.list_schedule import dense
from hetctl.methods.hopper.visit_times import HopWorker, visit_times
from hetctl.model.hops import gpus_in, worker_named
from hetctl.model.site import Node
from hetctl.model.workload import Workload

Homes = Mapping[str, Collection[str]]
"""Names of the partitions of each node, by its name."""


def workers_of(node: Node, size: int = 1) -> list[str]:
    """Return the workers of a node: groups of `size` GPUs, or a few more if that does not divide them."""
    groups = np.array_split(node.gpus, max(1, len(node.gpus) // size))
    return [worker_named(node.name, (int(gpu) for gpu in group)) for group in groups]


def hop_workers(nodes: Sequence[Node], homes: Homes, size: int) -> dict[str, HopWorker]:
    """Return the workers of all nodes by name, in groups of one size."""
    return {
        worker: HopWorker(node.gpu_type or "", homes.get(node.name, ()), len(gpus_in(worker)))
        for node in nodes
        for worker in workers_of(node, size)
    }


def group_size(
    members: Sequence[Workload], partitions: Sequence[str], nodes: Sequence[Node], homes: Homes
) -> int:
    """Return the size of groups with which an epoch of all members takes least time; 1: no groups.

    Groups are considered where there are fewer members than GPUs, in sizes that divide the GPUs of the
    largest node and for which the rates of all members are known.

    Parameters
    ----------
    partitions : sequence of str
        Partitions that every member visits.
    """
    gpus = [len(node.gpus) for node in nodes]
    is_covered = set().union(*homes.values()).issuperset(partitions)
    if not 0 < len(members) < sum(gpus) or not is_covered:
        return 1

    def epoch_s(size: int) -> float:
        workers = hop_workers(nodes, homes, size)
        return dense(visit_times(members, partitions, workers, dict.fromkeys(names, 0.0))).makespan_s

    names = [member.name for member in members]
    return min(_sizes(members, nodes, max(gpus)), key=epoch_s)


def _sizes(members: Sequence[Workload], nodes: Sequence[Node], most: int) -> list[int]:
    """Return the sizes that all members can have on all nodes, from the smallest."""
    divisors = (size for size in range(2, most + 1) if most % size == 0)
    return [1, *(size for size in divisors if _is_known(members, hop_workers(nodes, {}, size).values()))]


def _is_known(members: Sequence[Workload], workers: Iterable[HopWorker]) -> bool:
    """Return true if the rates of all members at all workers are known."""
    kinds = {(worker.gpu_type, worker.gpus) for worker in workers}
    return all(gpus in member.on_type(kind).rates for member in members for kind, gpus in kinds)
