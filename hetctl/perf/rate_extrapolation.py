"""Training rates on numbers of GPUs without a measurement, and their errors.

A member's rate is its rate on one number of GPUs, times how it scales from there. How it scales is one of a
grid of shapes: on w GPUs a sample takes 1/w + latency * log2(w) + transfer * [w > 1] + rest, in units of its
time of computation. These are the terms of Capes et al., Equation 3, where gradients are summed by
recursive doubling and halving. Before anything is measured, each shape has a probability. Each measured
rate changes it, for the member itself and, a little, for all others of its ensemble (`learned`). Optimus
(EuroSys 2018), Pollux (OSDI 2021) and Sia (SOSP 2023) fit such terms too, but to each job alone, and
without an error of what they predict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING

from hetctl.model.errors import BadInputError
from hetctl.model.values import dataclass

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LATENCY, TRANSFER, REST = (-5.02, 1.89), (-3.26, 1.39), (-3.29, 0.95)
"""Means and standard deviations of the natural logarithms of the terms, by expectation maximisation over 17
curves of ElasticFlow (A100, one batch on all GPUs, up to 64 GPUs) and 19 of Gavel (P100, up to 8 GPUs)."""
FIT_ERROR = 0.054
"""Root mean square of the logarithms of those curves' rates over the fitted ones."""
ERROR_PER_DOUBLING = 0.06
"""Error of the logarithm of a rate for each doubling from the nearest measured one, beside that of the shape:
real curves have steps, such as that from one node to two."""
PRIOR_MEMBERS = 3.0
"""Number of members with several measured rates that count as much as those curves."""
SHAPES_PER_TERM = 13, 13, 7
STEPS = tuple(product(*([4.8 * at / (count - 1) - 2.4 for at in range(count)] for count in SHAPES_PER_TERM)))
"""Standard deviations from the mean at which the grid has its shapes.

On a coarser grid most rates lie between the shapes, and whichever is nearest then counts as certain."""

Shapes = tuple[float, ...]
"""Probability of each shape of the grid."""


@lru_cache(maxsize=1)
def prior_shapes() -> Shapes:
    """Return the probabilities before anything is measured: three independent normal distributions."""
    weights = [math.exp(-math.fsum(step**2 for step in steps) / 2) for steps in STEPS]
    return tuple(weight / math.fsum(weights) for weight in weights)


def learned(tables: Iterable[Mapping[int, float]]) -> Shapes:
    """Return the probabilities of the shapes for a member of an ensemble with these measured rates.

    Each table of several rates is one more observation of a shape, beside the `PRIOR_MEMBERS` of the prior.
    """
    known = {points for table in tables if len(points := tuple(usable_rates(table).items())) > 1}
    if not known:
        return prior_shapes()
    import numpy as np

    prior = prior_shapes()
    sums = PRIOR_MEMBERS * np.array(prior)
    for points in sorted(known):
        sums += _posterior(points, prior)
    return tuple((sums / sums.sum()).tolist())


def _posterior(points: Sequence[tuple[int, float]], prior: Shapes) -> Floats:
    """Return the probabilities of the shapes after measured rates, of which there is at least one."""
    import numpy as np

    # The level of the rates is free: only what they are relative to their mean tells of the shape.
    off = np.log([rate for _, rate in points]) - _log_speedups(tuple(gpus for gpus, _ in points))
    squares = ((off - off.mean(axis=1, keepdims=True)) ** 2).sum(axis=1) / FIT_ERROR**2
    weights: Floats = np.array(prior) * np.exp(-(squares - squares.min()) / 2)
    weights /= weights.sum()
    return weights


@lru_cache(maxsize=256)
def _log_speedups(counts: tuple[int, ...]) -> Floats:
    """Return the logarithms of the rates of each shape (rows) on some numbers of GPUs (columns)."""
    import numpy as np

    gpus = np.array(counts, dtype=float)
    terms = np.array((LATENCY, TRANSFER, REST))
    factors = np.exp(terms[:, 0] + terms[:, 1] * np.array(STEPS))
    seconds: Floats = 1 / gpus + factors @ np.array((np.log2(gpus), gpus > 1, np.ones(len(gpus))))
    return -np.log(seconds)


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
    """Expected rates on consecutive numbers of GPUs.

    Parameters
    ----------
    rates : mapping of int to float
        Samples/s by number of GPUs.
    spread : mapping of int to float
        Standard error of the logarithm of each rate that was neither measured nor interpolated.
    measured : int
        Largest number of GPUs with a measured rate.
    notes : tuple of str
        Origin of rates that were not measured.
    """

    rates: Mapping[int, float]
    spread: Mapping[int, float]
    measured: int
    notes: tuple[str, ...] = ()

    @property
    def useful(self) -> dict[int, float]:
        """Rates up to the number of GPUs that is expected to be the fastest."""
        # max() returns the first of equal rates, which is the one with the fewest GPUs.
        peak = max(self.rates, key=self.rates.__getitem__)
        return {gpus: rate for gpus, rate in self.rates.items() if gpus <= peak}

    @property
    def promising(self) -> dict[int, float]:
        """Useful rates, and those up to the last number of GPUs that may be faster, within its error."""
        useful = self.useful
        fastest = max(useful.values())
        faster = (m for m, error in self.spread.items() if self.rates[m] * math.exp(error) > fastest)
        last = max(faster, default=0)
        return {gpus: rate for gpus, rate in self.rates.items() if gpus <= last or gpus in useful}

    @property
    def to_measure(self) -> tuple[int, ...]:
        """Numbers of GPUs to measure, since they may be faster, before plans can rely on them."""
        fastest = max((rate for gpus, rate in self.rates.items() if gpus <= self.measured), default=0.0)
        found, gpus = [], 2 * self.measured
        while self.rates.get(gpus, 0.0) * math.exp(self.spread.get(gpus, 0.0)) > fastest:
            found.append(gpus)
            gpus *= 2
        return tuple(found)


def rate_curve(
    measured: Mapping[int, float], max_gpus: int, least: int = 1, shapes: Shapes | None = None
) -> RateCurve:
    """Return the rates on `least` to `max_gpus` GPUs.

    Measured rates are kept, and rates between two that are at most a doubling apart are interpolated. All
    others follow from the nearest measured rates, each by how the member is expected to scale from there: at
    most in proportion to the GPUs. FLEET has its own Equation 5 beyond the last one (appendix B.3).

    Parameters
    ----------
    shapes : tuple of float or None
        Probabilities of how a member scales, from `learned`; None: before anything is measured.

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
    rates, spread = dict(points), dict[int, float]()
    unknown = [*range(least, first), *range(last + 1, max_gpus + 1)]
    if first > least:
        notes.append(f"predicted below {gpu_count(first)}")
    for low, high in pairwise(points):
        if high <= 2 * low:
            rates |= {m: _between(points, low, high, m) for m in range(low + 1, high)}
        else:
            unknown += range(low + 1, high)
        if high > low + 1:
            notes.append(
                f"{'interpolated' if high <= 2 * low else 'predicted'} between {low} and {gpu_count(high)}"
            )
    if unknown:
        predicted, spread = _predicted(points, unknown, shapes or prior_shapes())
        rates |= predicted
    if max_gpus > last:
        error = math.expm1(spread.get(2 * last, spread[max_gpus]))
        notes.append(f"predicted above {gpu_count(last)}, within {error:.0%} on {min(2 * last, max_gpus)}")
    counts = range(least, max_gpus + 1)
    return RateCurve(
        {m: rates[m] for m in counts},
        {m: spread[m] for m in counts if m in spread},
        last,
        tuple(notes),
    )


def _predicted(
    points: Mapping[int, float], wanted: Sequence[int], shapes: Shapes
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the expected rates on other numbers of GPUs, and the standard errors of their logarithms."""
    first = next(iter(points.values()))
    factors, spread = _scaled(tuple((m, rate / first) for m, rate in points.items()), tuple(wanted), shapes)
    return {m: first * factor for m, factor in zip(wanted, factors, strict=True)}, dict(
        zip(wanted, spread, strict=True)
    )


@lru_cache(maxsize=1024)
def _scaled(
    points: tuple[tuple[int, float], ...], wanted: tuple[int, ...], shapes: Shapes
) -> tuple[list[float], list[float]]:
    """Return those of members whose first rate is 1: many have one rate only, or that of a mate."""
    import numpy as np

    weights = _posterior(points, shapes)
    counts, rates = np.array([gpus for gpus, _ in points]), np.array([rate for _, rate in points])
    # Each shape is scaled to the measured rate that is nearest in doublings, below or above.
    distances = np.abs(np.log2(np.array(wanted)[:, None] / counts))
    nearest = distances.argmin(axis=1)
    # Most shapes have next to no probability after two rates.
    likely = weights > 1e-5 * weights.max()
    weights = weights[likely] / weights[likely].sum()
    gains = _log_speedups(wanted)[likely] - _log_speedups(tuple(counts.tolist()))[likely][:, nearest]
    mean = weights @ gains
    variance = weights @ (gains - mean) ** 2 + (ERROR_PER_DOUBLING * distances.min(axis=1)) ** 2
    return (rates[nearest] * np.exp(mean)).tolist(), np.sqrt(variance).tolist()


def rate_on(gpus: int, measured: Mapping[int, float]) -> float | None:
    """Return the rate on a number of GPUs, measured or from the curve; None if no rate is usable."""
    rate = measured.get(gpus, 0.0)
    # A status asks for measured rates mostly: a curve takes ten times as long as all else of its line.
    if _usable(rate):
        return rate
    return rate_curve(measured, gpus).rates[gpus] if usable_rates(measured) else None


def _usable(rate: float) -> bool:
    return math.isfinite(rate) and rate > 0


def gpu_count(gpus: int) -> str:
    """Return ``1 GPU``, ``2 GPUs``, .."""
    return f"{gpus} GPU{'s' * (gpus != 1)}"


def _between(points: Mapping[int, float], low: int, high: int, m: int) -> float:
    share = (m - low) / (high - low)
    return points[low] * (1 - share) + points[high] * share
