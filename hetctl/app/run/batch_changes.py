"""Changes of a member's global batch in the course of a run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hetctl.model.ensemble import Member
from hetctl.model.run_status import BatchChange
from hetctl.model.training_progress import EpochResult


def batch_changes(member: Member, epochs: Iterable[EpochResult]) -> tuple[BatchChange, ...]:
    """Return the changes of a data-parallel member's samples a step; none with a `global_batch_size`.

    An epoch whose parts were trained on different numbers of GPUs counts with the last of them.
    """
    if member.global_batch_size is not None:
        return ()
    known = [(epoch, epoch.gpus * epoch.batch_size) for epoch in epochs if epoch.batch_size is not None]
    return tuple(
        BatchChange(epoch.epoch, before, after, epoch.gpus)
        for (_, before), (epoch, after) in pairwise(known)
        if before != after
    )
