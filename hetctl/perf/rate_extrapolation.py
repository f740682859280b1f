"""Training rates on numbers of GPUs without a measurement, and their errors.

In the model, w GPUs sum gradients by recursive doubling and halving (Capes et al., section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from hetctl.model.errors import BadInputError

LEAST_SAMPLE_S = 1e-12
"""Least seconds of a sample: a fit may find that a number of GPUs takes no time at all."""


def fit_speed(points: Mapping[int, float]) -> Callable[[int], float]:
    """Return the rates in samples/s, f(w) in the paper, of a model of the seconds per sample on w GPUs.

    The model has the terms of Equation 3, not the ring's of Equation 5. The ring's latency grows with w: a
    fit to rates on few GPUs makes it too high, and on many GPUs it then exceeds all other time. The factors,
    all >= 0, are fitted by non-negative least squares of relative errors, as Capes et al. fit Equation 5.

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
    factors = theta.tolist()

    def rate(gpus: int) -> float:
        seconds = math.fsum(factor * term for factor, term in zip(factors, _terms(gpus), strict=True))
        return 1 / max(seconds, LEAST_SAMPLE_S)

    return rate


def _terms(w: int) -> tuple[float, ...]:
    """Return the terms of computation, latency, transfer and the rest."""
    return 1 / w, math.log2(w), float(w > 1), 1.0


ERROR_PER_DOUBLING = 0.1
"""Standard error of the logarithm of a predicted rate, for each doubling of the largest measured number. On
ElasticFlow's curves it is 0.08 to 0.10, from 4, 8 and 16 GPUs to up to eight times as many."""
UNKNOWN = 0.7
"""The same error if only one point was measured: more than a doubling can gain, log 2."""


def gpus_needed(single_rates: Iterable[float]) -> int:
    """Return M_a of the paper: GPUs with which the slowest member has the fastest one's single-GPU rate."""
    rates = [rate for rate in single_rates if _usable(rate)]
    # A ratio of 3.0000000000000004 must not become 4 GPUs.
    return math.ceil(max(rates) / min(rates) - 1e-9) if rates else 1


def profiled_gpus(gpus_per_node: int) -> int:
    """Return M_b of the paper: every number of GPUs up to it is measured."""
    return 2 * gpus_per_node


def largest_profile(single_rates: Iterable[float], gpus_per_node: int) -> int:
    """Return M_t of the paper: members are profiled on 1 to this many GPUs."""
    return max(gpus_needed(single_rates), profiled_gpus(gpus_per_node))


def usable_rates(measured: Mapping[int, float]) -> dict[int, float]:
    """Return the points with at least one GPU and a positive, finite rate, by number of GPUs."""
    return {m: measured[m] for m in sorted(measured) if m >= 1 and _usable(measured[m])}


@dataclass(frozen=True)
class RateCurve:
    """Rates on consecutive numbers of GPUs; the last ones may be predicted.

    Parameters
    ----------
    rates : mapping of int to float
        Samples/s by number of GPUs.
    measured : int
        Largest number of GPUs with a measured rate; rates above it are predicted.
    error : float
        Standard error of the logarithm of a predicted rate, for each doubling of `measured`.
    notes : tuple of str
        Origin of rates that were not measured.
    """

    rates: Mapping[int, float]
    measured: int
    error: float
    notes: tuple[str, ...] = ()

    def spread(self, gpus: int) -> float:
        """Return the standard error of a rate, relative to it; 0 up to the measured numbers."""
        return math.exp(self.error * math.log2(max(gpus / self.measured, 1))) - 1

    @property
    def useful(self) -> dict[int, float]:
        """Rates up to the last number of GPUs that is faster than all smaller ones by more than the error."""
        # max() returns the first of equal rates, which is the one with the fewest GPUs.
        peak = max(self.rates, key=lambda gpus: self.rates[gpus] / (1 + self.spread(gpus)))
        return {gpus: rate for gpus, rate in self.rates.items() if gpus <= peak}

    @property
    def unsure(self) -> dict[int, float]:
        """Rates on more GPUs than the useful ones."""
        useful = self.useful
        return {gpus: rate for gpus, rate in self.rates.items() if gpus not in useful}

    @property
    def to_measure(self) -> tuple[int, ...]:
        """Numbers of GPUs to measure, since they may be faster, before plans can rely on them."""
        fastest = max((rate for gpus, rate in self.rates.items() if gpus <= self.measured), default=0.0)
        found, gpus = [], 2 * self.measured
        while self.rates.get(gpus, 0.0) > fastest:
            found.append(gpus)
            gpus *= 2
        return tuple(found)


def rate_curve(measured: Mapping[int, float], max_gpus: int, least: int = 1) -> RateCurve:
    """Return the rates on `least` to `max_gpus` GPUs.

    Measured rates are kept, and rates between them are interpolated. Below the first one they are in
    proportion to it. Beyond the last one they are those of `fit_speed` (Capes et al., Equation 3), scaled to
    it and at most in proportion to it. FLEET has its own Equation 5 there (appendix B.3).

    Raises
    ------
    BadInputError
        If no measured rate is above zero.
    """
    points = usable_rates(measured)
    if not points:
        raise BadInputError("no measured rate is above zero", hint="run hetctl profile")
    first, last = min(points), max(points)
    notes = [f"unusable rate at {gpu_count(m)} left out" for m in sorted(measured) if m not in points]
    rates = dict(points)
    if first > least:
        rates |= {m: points[first] * m / first for m in range(least, first)}
        notes.append(f"proportional below {gpu_count(first)}: no fewer were measured")
    for low, high in pairwise(points):
        rates |= {m: _between(points, low, high, m) for m in range(low + 1, high)}
        if high > low + 1:
            notes.append(f"interpolated between {low} and {gpu_count(high)}")
    error = 0.0
    if max_gpus > last:
        predicted, error = _predicted(points, range(last + 1, max_gpus + 1)), _error(points)
        rates |= predicted
        notes.append(
            f"proportional above {gpu_count(last)}: one point was measured"
            if len(points) == 1
            else f"predicted above {gpu_count(last)}, within {math.expm1(error):.0%} for each doubling"
        )
    curve = RateCurve({m: rates[m] for m in range(least, max_gpus + 1)}, last, error)
    if curve.to_measure:
        notes.append(f"measure on {gpu_count(curve.to_measure[0])} first")
    return replace(curve, notes=tuple(notes))


def rate_on(gpus: int, measured: Mapping[int, float]) -> float | None:
    """Return the rate on a number of GPUs, measured or from the curve; None if no rate is usable."""
    return rate_curve(measured, gpus).rates[gpus] if usable_rates(measured) else None


def _predicted(points: Mapping[int, float], wanted: Iterable[int]) -> dict[int, float]:
    """Return the rates on more GPUs than were measured."""
    last = max(points)
    if len(points) == 1:
        return {m: points[last] * m / last for m in wanted}
    model = fit_speed(points)
    scale = points[last] / model(last)
    return {m: min(scale * model(m), points[last] * m / last) for m in wanted}


def _error(points: Mapping[int, float]) -> float:
    """Return the standard error of predictions, at least that with which smaller numbers predict the last."""
    last = max(points)
    others = {m: rate for m, rate in points.items() if m <= last / 2} or {
        m: rate for m, rate in points.items() if m < last
    }
    if not others:
        return UNKNOWN
    off = abs(math.log(_predicted(others, [last])[last] / points[last]))
    return max(off / math.log2(last / max(others)), ERROR_PER_DOUBLING)


def _usable(rate: float) -> bool:
    return math.isfinite(rate) and rate > 0


def gpu_count(gpus: int) -> str:
    """Return ``1 GPU``, ``2 GPUs``, .."""
    return f"{gpus} GPU{'s' * (gpus != 1)}"


def _between(points: Mapping[int, float], low: int, high: int, m: int) -> float:
    share = (m - low) / (high - low)
    return points[low] * (1 - share) + points[high] * share
