"""Division of samples into parts: which samples each part of partitioned data has."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetctl.model.errors import BadInputError

Numbers = npt.NDArray[np.int64]

TRAINING, VALIDATION = "training", "validation"
STREAMS = {TRAINING: 0, VALIDATION: 1}
"""Numbers that a seed is combined with, so that both divisions are independent."""


def split(name: str, samples: int, count: int, seed: int) -> tuple[Numbers, ...]:
    """Divide samples at random into parts whose sizes differ by 1 at most.

    Parameters
    ----------
    name : str
        ``training`` or ``validation``.
    samples, count : int
        Number of samples and of parts.
    seed : int
        Seed of the random order.

    Returns
    -------
    tuple of arrays of int64
        Numbers of the samples of each part, ascending: samples on a disk are read in its order, and those
        of a part are shuffled anew in each epoch.

    Raises
    ------
    BadInputError
        If a part would be empty.
    """
    if samples < count:
        raise BadInputError(
            f"{samples} {name} samples cannot be divided into {count} parts: each needs at least one",
            f"lower --count to {samples} or less, or have more {name} samples",
        )
    order = np.random.default_rng([seed, STREAMS[name]]).permutation(samples)
    return tuple(np.sort(part) for part in np.array_split(order, count))
