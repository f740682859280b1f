"""Times of visits of the members of an ensemble, by worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetctl.methods.hopper.unit_times import UnitTimes
from hetctl.model.errors import BadInputError
from hetctl.model.workload import Workload

MEETING_S = 0.2
"""Seconds in which the ranks of a group connect, in each visit: those of Horovod, PyTorch's take less."""


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
                whole_s(member, *kind) / len(partitions) + hop_s[member.name] + MEETING_S * (kind[1] > 1)
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
