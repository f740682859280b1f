"""Gradients of uneven batches, so that each sample counts the same (LB-BSP, section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetctl.model.errors import BadInputError

Array = NDArray[np.float64]


def weights(batches: Sequence[int]) -> Array:
    """Return |B_i| / X by worker: what each gradient counts for in a sum (Equation 7).

    Raises
    ------
    BadInputError
        If a batch is negative or all are 0.
    """
    samples = np.array(batches, dtype=float)
    if not samples.any() or (samples < 0).any():
        raise BadInputError(f"batches {list(batches)} cannot be weights: none below 0, one above")
    parts: Array = samples / samples.sum()
    return parts


def scale_factors(batches: Sequence[int]) -> Array:
    """Return n x_i / X by worker: what each gradient is multiplied by before a mean (Algorithm 3, line 8).

    Raises
    ------
    BadInputError
        As `weights`.
    """
    return len(batches) * weights(batches)


def weighted_mean(gradients: Sequence[Array], batches: Sequence[int]) -> Array:
    """Return the gradient of the whole batch from the mean gradients of its uneven parts (Equation 7).

    Parameters
    ----------
    gradients : sequence of array
        One by worker, of equal shapes: g_i, the mean over its own batch.

    Raises
    ------
    BadInputError
        As `weights`.
    """
    total: Array = np.tensordot(weights(batches), np.stack(gradients), axes=1)
    return total
