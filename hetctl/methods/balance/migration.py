"""Migration of samples between workers that hold their own data (LB-BSP, section 3.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetctl.model.errors import BadInputError

GAP = 2.0
"""Largest difference of the traversals of two partitions before samples migrate (footnote 5)."""


@dataclass(frozen=True)
class Migration:
    """Samples that one worker transfers to another.

    Afterwards the traversals of all partitions are counted from 0 again.
    """

    source: int
    target: int
    samples: int


def next_migration(
    partitions: Sequence[int], drawn: Sequence[int], batches: Sequence[int], gap: float = GAP
) -> Migration | None:
    """Return the next migration (section 3.5); None while no partition leads by more than `gap` traversals.

    Samples move from the worker with the fewest traversals of its partition to the one with the most, so
    many that with their present batches both traverse their partitions about equally often.

    Parameters
    ----------
    partitions : sequence of int
        Samples that each worker holds, at least 1 each.
    drawn : sequence of int
        Samples that each worker has taken since the last migration.
    batches : sequence of int
        Batch of each worker in an iteration, x_i.

    Raises
    ------
    BadInputError
        If a partition is empty, or the lengths of the sequences differ.
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
