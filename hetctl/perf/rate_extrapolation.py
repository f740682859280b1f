"""Training rates on numbers of GPUs without a measurement (FLEET, appendix B.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

from hetctl.model.errors import BadInputError

LEAST_SHARE = 1e-9


def gpus_needed(single_rates: Iterable[float]) -> int:
    """Return M_a of the paper: GPUs with which the slowest member has the fastest one's single-GPU rate."""
    rates = [rate for rate in single_rates if _usable(rate)]
    # A ratio of 3.0000000000000004 must not become 4 GPUs.
    return math.ceil(max(rates) / min(rates) - 1e-9) if rates else 1


def profiled_gpus(gpus_per_node: int) -> int:
    """Return M_b of the paper: the number of GPUs at which Equation 5 is anchored."""
    return 2 * gpus_per_node


def largest_profile(single_rates: Iterable[float], gpus_per_node: int) -> int:
    """Return M_t of the paper: members are profiled on 1 to this many GPUs."""
    return max(gpus_needed(single_rates), profiled_gpus(gpus_per_node))


def usable_rates(measured: Mapping[int, float]) -> dict[int, float]:
    """Return the points with at least one GPU and a positive, finite rate, by number of GPUs."""
    return {m: measured[m] for m in sorted(measured) if m >= 1 and _usable(measured[m])}


def rate_curve(
    measured: Mapping[int, float], max_gpus: int, gpus_per_node: int, least: int = 1
) -> tuple[dict[int, float], tuple[str, ...]]:
    """Return the rate on each of `least` to `max_gpus` GPUs, and notes on deviations from Equation 5.

    Measured rates are kept, rates between them are interpolated. Beyond the last one, Equation 5 is used,
    anchored at M_b. If M_b or M_b - 1 was not measured, the two largest measured numbers of GPUs replace
    them, with the loss of efficiency between them spread evenly over the GPUs in between; for two
    consecutive numbers this is Equation 5 itself.

    Raises
    ------
    BadInputError
        If no measured rate is above zero.
    """
    points = usable_rates(measured)
    if not points:
        raise BadInputError("no measured rate is above zero", hint="run hetctl profile")
    first, last = min(points), max(points)
    notes = [f"unusable rate at {_gpus(m)} left out" for m in sorted(measured) if m not in points]
    rates = dict(points)
    if first > least:
        rates |= {m: points[first] * m / first for m in range(least, first)}
        notes.append(f"proportional below {_gpus(first)}: no fewer were measured")
    for low, high in pairwise(points):
        rates |= {m: _between(points, low, high, m) for m in range(low + 1, high)}
        if high > low + 1:
            notes.append(f"interpolated between {low} and {_gpus(high)}")
    if max_gpus > last:
        rates |= _beyond(points, max_gpus, gpus_per_node, notes)
    return {m: rates[m] for m in range(least, max_gpus + 1)}, tuple(notes)


def rate_on(gpus: int, measured: Mapping[int, float], gpus_per_node: int) -> float | None:
    """Return the rate on a number of GPUs, measured or from the curve; None if no rate is usable."""
    if _usable(measured.get(gpus, 0.0)):
        return measured[gpus]
    return rate_curve(measured, gpus, gpus_per_node)[0][gpus] if usable_rates(measured) else None


def _usable(rate: float) -> bool:
    return math.isfinite(rate) and rate > 0


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _between(points: Mapping[int, float], low: int, high: int, m: int) -> float:
    share = (m - low) / (high - low)
    return points[low] * (1 - share) + points[high] * share


def _beyond(
    points: Mapping[int, float], max_gpus: int, gpus_per_node: int, notes: list[str]
) -> dict[int, float]:
    """Apply Equation 5 beyond the largest measured number; add deviations from it to `notes`."""
    last = max(points)
    wanted = range(last + 1, max_gpus + 1)
    if len(points) == 1:
        notes.append(f"proportional above {_gpus(last)}: one point was measured")
        return {m: points[last] * m / last for m in wanted}
    m_b = profiled_gpus(gpus_per_node)
    low, anchor = _anchors(points, m_b)
    if (low, anchor) != (m_b - 1, m_b):
        notes.append(f"Equation 5 from {low} and {_gpus(anchor)}, not from M_b")
    per_gpu = points[anchor] / anchor
    loss = (per_gpu / (points[low] / low)) ** (1 / (anchor - low))
    if loss > 1:
        notes.append(f"proportional above {_gpus(last)}: superlinear up to {anchor}")
    least = LEAST_SHARE * points[anchor]
    # Deviation from Equation 5: a bracket above 1 would grow without limit, and a small one underflow to 0.
    return {m: max(m * per_gpu * min(loss, 1.0) ** (m - anchor), least) for m in wanted}


def _anchors(points: Mapping[int, float], anchor: int) -> tuple[int, int]:
    if anchor in points and anchor - 1 in points:
        return anchor - 1, anchor
    low, high = sorted(points)[-2:]
    return low, high
