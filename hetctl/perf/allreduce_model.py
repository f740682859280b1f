"""Speed on w GPUs that sum their gradients by recursive doubling and halving (Capes et al., section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

LEAST_S = 1e-12
"""Least seconds of a sample: a fit may find that a number of GPUs takes no time at all."""


@dataclass(frozen=True)
class SpeedModel:
    """Seconds per sample on w GPUs, with the terms of Equation 3.

    In place of the ring's, which are those of Equation 5: from rates on few GPUs the ring's latency, in
    proportion to w, is fitted too high, and then exceeds all other time on many.

    Parameters
    ----------
    theta : tuple of float
        Factors, all >= 0, of computation, latency, transfer and the rest: 1 / w, log2 w, w > 1, and 1.
    """

    theta: tuple[float, ...]

    def rate(self, gpus: int) -> float:
        """Return samples/s: f(w) in the paper."""
        seconds = math.fsum(factor * term for factor, term in zip(self.theta, _terms(gpus), strict=True))
        return 1 / max(seconds, LEAST_S)


def fit_speed(points: Mapping[int, float]) -> SpeedModel:
    """Fit the model by non-negative least squares of relative errors, as Capes et al. fit Equation 5.

    Parameters
    ----------
    points : mapping of int to float
        Samples/s by number of GPUs, at least one and all above 0.
    """
    # Imported on use: every driver imports this module with the planners, and not all fit a speed.
    import numpy as np
    from scipy.optimize import nnls

    # Rows times rate have the target 1, so that the residuals are relative errors.
    rows = np.array([[rate * term for term in _terms(gpus)] for gpus, rate in points.items()])
    theta, _ = nnls(rows, np.ones(len(points)))
    return SpeedModel(tuple(theta.tolist()))


def _terms(w: int) -> tuple[float, ...]:
    return 1 / w, math.log2(w), float(w > 1), 1.0
