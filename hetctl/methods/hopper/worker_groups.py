"""Workers that members visit: GPUs, or groups where GPUs are left over, and modes (CEREBRO, appendix 12).

In the paper each worker of a group has a partition of its own. Here a group's GPUs are on one node and train
on the same partition, so that members visit as many partitions as without groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.hopper.list_schedule import Residual, dense
from hetctl.methods.hopper.schedule import Schedule, UnitTimes
from hetctl.model.errors import BadInputError
from hetctl.model.hops import gpus_in, worker_named
from hetctl.model.plan import DATA_PARALLEL, HOPPER
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


HYBRID = "hybrid"

Efficiency = Callable[[int], float]
"""Share of the ideal rate by size of a group: rate / (size * rate of one)."""
Groups = tuple[tuple[int, ...], ...]
"""Numbers of the workers in each group."""


def modes(configs: int, workers: int) -> tuple[str, ...]:
    """Return the training modes by the rule of appendix 12: the hopper if p/2 < ``|S|``.

    Otherwise the paper uses data parallelism. The hybrid, which lies between the two, comes second, for
    callers that compare the cost of both.
    """
    return (HOPPER,) if workers / 2 < configs else (DATA_PARALLEL, HYBRID)


def hopper_epochs(epochs: Sequence[int], gpus: int) -> int:
    """Return the number of epochs that have enough configurations for hopping (CEREBRO, appendix 12).

    Parameters
    ----------
    epochs : sequence of int
        Epochs that each configuration has left. Configurations that are done leave, until too few remain.
    gpus : int
        Number of workers, p in the paper.
    """
    left = sorted(epochs, reverse=True)
    return next((left[n - 1] for n in range(1, len(left) + 1) if modes(n, gpus)[0] == HOPPER), 0)


def groups(mode: str, units: UnitTimes) -> Groups:
    """Return the groups of workers: all workers in one, or in the hybrid one group per configuration.

    The hybrid's groups have equal sizes or differ by one worker. Since a group is as slow as its slowest
    worker, workers of similar speed are grouped. In the hopper each worker is a group.
    """
    if mode == HOPPER:
        return tuple((worker,) for worker in range(len(units.workers)))
    busy_s = _by_worker(units).sum(axis=0)
    workers = sorted(range(len(units.workers)), key=lambda worker: float(busy_s[worker]))
    count = min(len(units.configs), len(workers)) if mode == HYBRID else 1
    return tuple(tuple(int(worker) for worker in part) for part in np.array_split(workers, count))


def grouped(units: UnitTimes, parts: Groups, efficiency: Efficiency) -> UnitTimes:
    """Return the unit times of groups, between which configurations hop.

    Every worker of a group processes its own partition in step with the others, so the sub-epoch takes as
    long as that of the slowest worker, divided by the efficiency of the group.

    Raises
    ------
    BadInputError
        If partitions are on several workers, or a worker has several.
    """
    matrix = _by_worker(units)
    columns = [matrix[:, list(part)].max(axis=1) / efficiency(len(part)) for part in parts]
    names = ["+".join(units.workers[worker] for worker in part) for part in parts]
    return UnitTimes.from_matrix(np.stack(columns, axis=1), units.configs, names)


def _by_worker(units: UnitTimes) -> NDArray[np.float64]:
    """Return the unit times in seconds, shape (configs, workers), each worker on its own partition."""
    return units.matrix[:, np.argsort(units.homes)]


@dataclass(frozen=True)
class ModeCost:
    """Schedule of one training mode; its groups of workers act as the hopper's workers.

    Parameters
    ----------
    groups : Groups
        Numbers of the workers in each group.
    units : UnitTimes
        Unit times of the groups.
    schedule : Schedule
        Schedule of one epoch.
    """

    mode: str
    groups: Groups
    units: UnitTimes
    schedule: Schedule


def estimated_costs(
    units: UnitTimes,
    modes: Iterable[str],
    efficiency: Efficiency,
    schedule: Callable[[UnitTimes], Schedule],
) -> list[ModeCost]:
    """Return the modes from the fastest to the slowest; equally fast ones stay in the given order.

    Parameters
    ----------
    efficiency : callable
        Efficiency of a group that trains data-parallel, by its size.
    schedule : callable
        Scheduler of the hopper, with its options.

    Raises
    ------
    BadInputError
        If partitions are on several workers or a worker has several, and a mode groups workers.
    """
    costs = []
    for mode in modes:
        parts = groups(mode, units)
        times = units if mode == HOPPER else grouped(units, parts, efficiency)
        costs.append(ModeCost(mode, parts, times, schedule(times)))
    # The sort is stable: at equal costs the mode that the paper's rule prefers stays first.
    return sorted(costs, key=lambda one: one.schedule.makespan_s)
