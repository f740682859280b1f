"""Workers that members visit: GPUs, or groups of them where GPUs are left over (CEREBRO, appendix 12).

In the paper each worker of a group has a partition of its own. Here a group's GPUs are on one node and train
on the same partition, so that members visit as many partitions as without groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from hetctl.methods.hopper.list_schedule import Residual, dense
from hetctl.methods.hopper.unit_times import UnitTimes
from hetctl.model.errors import BadInputError
from hetctl.model.hops import gpus_in, worker_named
from hetctl.model.site import Node
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload

GROUP_CONNECT_S = 0.2
"""Seconds in which the ranks of a group connect in each visit, with Horovod; PyTorch takes less."""

Homes = Mapping[str, Collection[str]]
"""Names of the partitions of each node, by its name."""


@dataclass(frozen=True)
class HopWorker:
    """A GPU at which members train, or a group of GPUs of one node.

    Parameters
    ----------
    partitions : collection of str
        Partitions on its node.
    """

    gpu_type: str
    partitions: Collection[str]
    gpus: int = 1


def visit_times(
    members: Sequence[Workload],
    partitions: Sequence[str],
    workers: Mapping[str, HopWorker],
    hop_s: Mapping[str, float],
    *,
    evaluates: bool = False,
) -> UnitTimes:
    """Return the time of each member for each partition at each worker: its share of an epoch, and a hop.

    A group also has to meet.

    Parameters
    ----------
    workers : mapping of str to HopWorker
        Workers by name.
    hop_s : mapping of str to float
        Seconds of a hop, by member.
    evaluates : bool
        True for visits that evaluate, instead of those that train.

    Raises
    ------
    BadInputError
        If the number of samples per epoch of a member is unknown.
    InfeasibleError
        If a partition is at no worker.
    """
    whole_s = _evaluation_s if evaluates else _epoch_s
    has = np.array([[name in worker.partitions for worker in workers.values()] for name in partitions])
    kinds = [(worker.gpu_type, worker.gpus) for worker in workers.values()]
    different = list(dict.fromkeys(kinds))
    by_kind = np.array(
        [
            [
                whole_s(member, *kind) / len(partitions)
                + hop_s[member.name]
                + GROUP_CONNECT_S * (kind[1] > 1)
                for kind in different
            ]
            for member in members
        ]
    )
    seconds = by_kind[:, [different.index(kind) for kind in kinds]]
    return UnitTimes(
        configs=tuple(member.name for member in members),
        partitions=tuple(partitions),
        workers=tuple(workers),
        seconds=np.where(has[None], seconds[:, None], np.inf),
    )


def _epoch_s(member: Workload, gpu_type: str, gpus: int) -> float:
    if not member.samples_per_epoch:
        raise BadInputError(
            f"the profile of {member.name} has no samples_per_epoch, which hopping requires",
            "run hetctl profile, or set samples_per_epoch in the ensemble file",
        )
    return member.samples_per_epoch / member.on_type(gpu_type).rates[gpus]


def _evaluation_s(member: Workload, _gpu_type: str, _gpus: int) -> float:
    return member.evaluate_s


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
    """Return the size of groups that makes an epoch of all members shortest; 1: no groups.

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
        times = visit_times(members, partitions, workers, dict.fromkeys(names, 0.0))
        return dense(Residual.whole(times)).makespan_s

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
