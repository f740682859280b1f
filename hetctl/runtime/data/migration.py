"""Migration of samples between workers that hold their own data (LB-BSP, section 3.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetctl.model.errors import BadInputError


@dataclass(frozen=True)
class Migration:
    """Number of samples that one worker transfers to another."""

    source: int
    target: int
    samples: int


def next_migration(
    held: Sequence[int], visits: Sequence[int], batches: Sequence[int], gap: float
) -> Migration | None:
    """Return the next migration (section 3.5); None while no partition leads by more than `gap` traversals.

    Samples move from the worker with the fewest traversals of its partition to the one with the most, so
    many that with their present batches both traverse their partitions about equally often.

    Parameters
    ----------
    held : sequence of int
        Samples that each worker holds, at least 1 each.
    visits : sequence of int
        Visits of the samples that each worker holds, in total.
    batches : sequence of int
        Batch of each worker in an iteration, x_i.
    gap : float
        Largest difference of the mean visits before samples migrate.

    Raises
    ------
    BadInputError
        If a partition is empty, or the lengths of the sequences differ.
    """
    if not len(held) == len(visits) == len(batches) or min(held, default=0) < 1:
        raise BadInputError(
            f"held {list(held)}, visits {list(visits)}, batches {list(batches)}: "
            "one of each by worker, and no worker without samples"
        )
    traversals = [seen / own for seen, own in zip(visits, held, strict=True)]
    workers = range(len(traversals))
    source = min(workers, key=traversals.__getitem__)
    target = max(workers, key=traversals.__getitem__)
    if traversals[target] - traversals[source] <= gap:
        return None
    both = held[source] + held[target]
    fair = both * batches[target] // (batches[source] + batches[target])
    samples = min(fair, both - 1) - held[target]
    return Migration(source, target, samples) if samples > 0 else None
