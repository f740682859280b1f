"""Aggregation of gradients of uneven batches with equal weight for each sample (LB-BSP, section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetctl.model.errors import BadInputError

Values = NDArray[np.float64]


def weights(batches: Sequence[int]) -> Values:
    """Return |B_i| / X by worker, the weight of each gradient in the sum (Equation 7).

    Raises
    ------
    BadInputError
        If a batch is negative or all are 0.
    """
    samples = np.array(batches, dtype=float)
    if not samples.any() or (samples < 0).any():
        raise BadInputError(
            f"batches {list(batches)} cannot be weights: all must be at least 0, and one above 0"
        )
    parts: Values = samples / samples.sum()
    return parts


def scale_factors(batches: Sequence[int]) -> Values:
    """Return n x_i / X by worker, the factor of each gradient before a plain mean (Algorithm 3, line 8).

    Raises
    ------
    BadInputError
        See `weights`.
    """
    return len(batches) * weights(batches)


def weighted_mean(gradients: Sequence[Values], batches: Sequence[int]) -> Values:
    """Return the gradient of the whole batch from the mean gradients of its uneven parts (Equation 7).

    Parameters
    ----------
    gradients : sequence of array
        Mean gradient g_i of each worker over its own batch, all of the same shape.

    Raises
    ------
    BadInputError
        See `weights`.
    """
    total: Values = np.tensordot(weights(batches), np.stack(gradients), axes=1)
    return total
