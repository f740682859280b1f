"""Data that live with their workers, passed on until all are seen equally often (LB-BSP, section 3.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetctl.model.errors import BadInputError

GAP = 2.0
"""By so many traversals one partition may be ahead of another (footnote 5)."""


@dataclass(frozen=True)
class Migration:
    """Samples that one worker passes on to another.

    Once it is done, the traversals of all partitions are counted from 0 again.
    """

    source: int
    target: int
    samples: int


def next_migration(
    partitions: Sequence[int], drawn: Sequence[int], batches: Sequence[int], gap: float = GAP
) -> Migration | None:
    """Return what to migrate now, or None while no partition is ahead by more than `gap` traversals.

    From the worker that went through its partition least often to the one that did most often, and so
    many samples that with their batches of today both go through theirs equally often, or nearly so.

    Parameters
    ----------
    partitions : sequence of int
        Samples that each worker holds, at least 1.
    drawn : sequence of int
        Samples that each worker has taken since the last migration.
    batches : sequence of int
        Samples that each takes in an iteration, x_i.

    Raises
    ------
    BadInputError
        If a partition is empty, or there are not as many of each.
    """
    if not len(partitions) == len(drawn) == len(batches) or min(partitions, default=0) < 1:
        raise BadInputError(
            f"partitions {list(partitions)}, drawn {list(drawn)}, batches {list(batches)}: "
            "one of each by worker, and no partition empty"
        )
    traversals = [taken / held for taken, held in zip(drawn, partitions, strict=True)]
    workers = range(len(traversals))
    source = min(workers, key=traversals.__getitem__)
    target = max(workers, key=traversals.__getitem__)
    if traversals[target] - traversals[source] <= gap:
        return None
    both = partitions[source] + partitions[target]
    fair = both * batches[target] // (batches[source] + batches[target])
    samples = min(fair, both - 1) - partitions[target]
    return Migration(source, target, samples) if samples > 0 else None
