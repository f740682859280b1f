"""Predicted rates on more GPUs than a form was fitted on, beside rates that others measured there.

Forms are compared by leaving out each rate on 2 to 8 GPUs in turn; larger numbers of GPUs have no part in
the choice. ElasticFlow's curves are of one batch on all GPUs (A100), Gavel's of a batch on each (P100).

    python tests/benchmarks/bench.py scaling      (HETCTL_DATA names the folder of the tables)
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import static_bench
from scipy.optimize import nnls
from tables import Figure, Table

from hetctl.perf.rate_extrapolation import rate_curve

Rates = Mapping[int, float]
Form = Callable[[Rates, int], float]
FITTED = (1, 2, 4, 8)
FEWER = (1, 2, 4)
BARS = {2: 0.1, 4: 0.2, 8: 0.3}
"""Largest median error by the factor between the predicted number of GPUs and the largest fitted one."""


def product(points: Rates, gpus: int) -> float:
    """Return the rate by hetctl: the terms of Capes et al., Equation 3, with a prior; or interpolated."""
    return rate_curve(points, max(gpus, *points)).rates[gpus]


def fleet(points: Rates, gpus: int) -> float:
    """Return the rate by FLEET, Equation 5, from the two largest numbers of GPUs."""
    low, high = sorted(points)[-2:]
    loss = (points[high] / high / (points[low] / low)) ** (1 / (high - low))
    return gpus * points[high] / high * min(loss, 1.0) ** (gpus - high)


def power_law(points: Rates, gpus: int) -> float:
    """Return the rate by the slope between the two largest numbers of GPUs, both axes logarithmic."""
    low, high = sorted(points)[-2:]
    slope = math.log(points[high] / points[low]) / math.log(high / low)
    return points[high] * (gpus / high) ** min(slope, 1.0)


def of_terms(terms: Callable[[int], tuple[float, ...]], points: Rates, gpus: int) -> float:
    """Return the rate by a sum of terms of the time by least squares, scaled to the nearest point."""
    rows = np.array([[rate * term for term in terms(m)] for m, rate in points.items()])
    factors, _ = nnls(rows, np.ones(len(points)))
    nearest = min(points, key=lambda m: abs(math.log(m / gpus)))
    seconds, known_s = (float(factors @ terms(m)) for m in (gpus, nearest))
    below = max((m for m in points if m <= gpus), default=None)
    rate = points[nearest] * known_s / max(seconds, 1e-12)
    return rate if below is None else min(rate, points[below] * gpus / below)


FORMS: dict[str, Form] = {
    "hetctl": product,
    "Capes et al., Equation 3": partial(of_terms, lambda m: (1 / m, math.log2(m), float(m > 1), 1.0)),
    "Amdahl, logarithmic latency": partial(of_terms, lambda m: (1 / m, math.log2(m), 1.0)),
    "Amdahl": partial(of_terms, lambda m: (1 / m, 1.0)),
    "Capes et al., Equation 5 (ring)": partial(of_terms, lambda m: (1 / m, m - 1, (m - 1) / m, 1.0)),
    "power law": power_law,
    "FLEET, Equation 5": fleet,
}
OF_EACH = "the best of these for each curve"


def among(points: Rates, counts: Iterable[int]) -> dict[int, float]:
    """Return the rates on these numbers of GPUs."""
    return {m: points[m] for m in counts if m in points}


def left_out(form: Form, curve: Rates) -> list[float]:
    """Return the errors, as logarithms, of each rate but the first by all others."""
    return [
        math.log(max(form({m: rate for m, rate in curve.items() if m != out}, out), 1e-9) / curve[out])
        for out in list(curve)[1:]
    ]


def root_mean_square(errors: Sequence[float]) -> float:
    """Return the root of the mean of the squares."""
    return math.sqrt(statistics.fmean(error**2 for error in errors))


def best_of_each(points: Rates, gpus: int) -> float:
    """Return the rate by the form that predicts each point of this curve best from the others."""
    best = min(FORMS.values(), key=lambda form: root_mean_square(left_out(form, points)))
    return best(points, gpus)


def errors(form: Form, curves: Iterable[Rates], fitted: Sequence[int], gpus: int) -> list[float]:
    """Return the relative errors at a number of GPUs, of the curves that have it."""
    whole = [curve for curve in curves if gpus in curve and set(fitted) <= curve.keys()]
    return [form(among(curve, fitted), gpus) / curve[gpus] - 1 for curve in whole]


def within(curves: Iterable[Rates], fitted: Sequence[int], counts: Sequence[int]) -> float:
    """Return the share of predictions that are off by at most their spread."""
    hits = [
        abs(math.log(curve.rates[gpus] / truth[gpus])) <= curve.spread[gpus]
        for truth in curves
        for gpus in counts
        if gpus in truth
        for curve in [rate_curve(among(truth, fitted), gpus)]
    ]
    return sum(hits) / len(hits)


def too_many(curves: Iterable[Rates], fitted: Sequence[int]) -> float:
    """Return the share of the curves that are slower on the most useful GPUs than on the largest fitted."""
    worse = []
    for truth in curves:
        most = max(gpus for gpus in truth if gpus <= max(rate_curve(among(truth, fitted), max(truth)).useful))
        worse.append(truth[most] < max(among(truth, fitted).values()) * (1 - 1e-9))
    return sum(worse) / len(worse)


def table(_quick: bool = False) -> Table:
    """Compare the forms."""
    title = "Rates on more GPUs than were measured: median error"
    folder = Path(os.environ.get("HETCTL_DATA") or os.devnull)
    if not all(any(folder.glob(f"{data}*")) for data in static_bench.SETS):
        sets = " and ".join(static_bench.SETS)
        return Table(title, (), (), note=f"Not run: HETCTL_DATA names no folder with the tables {sets}.")
    elastic, gavel = (static_bench.tables(folder, data) for data in static_bench.SETS)
    gavel = [curve for curve in gavel if set(FITTED) <= curve.keys()]
    return compared(title, elastic, gavel)


def compared(title: str, elastic: Sequence[Rates], gavel: Sequence[Rates]) -> Table:
    """Return a row for each form, with figures of what hetctl predicts."""
    tasks = (
        *((elastic, FITTED, gpus) for gpus in (16, 32, 64)),
        *((elastic, FEWER, gpus) for gpus in (8, 16, 32)),
        (gavel, FEWER, 8),
    )
    known = [among(curve, FITTED) for curve in (*elastic, *gavel)]
    rows = []
    for name, form in {**FORMS, OF_EACH: best_of_each}.items():
        out = (
            root_mean_square([e for curve in known for e in left_out(form, curve)]) if name in FORMS else 0.0
        )
        cells = (f"{statistics.median(errors(form, *task)):+.0%}" for task in tasks)
        rows.append((name, f"{out:.3f}" * (name in FORMS), *cells))
    figures = [
        Figure(
            f"{'ElasticFlow' if curves is elastic else 'Gavel'}, from {max(fitted)} to {gpus} GPUs",
            statistics.median(map(abs, errors(product, curves, fitted, gpus))),
            BARS[gpus // max(fitted)],
        )
        for curves, fitted, gpus in tasks
    ]
    figures += [
        Figure("predictions beyond their spread", 1 - within(elastic, FITTED, (16, 32, 64)), 0.4),
        Figure("curves that are given too many GPUs", too_many(elastic, FITTED), 0.1),
    ]
    header = ("form", "left out", "8: 16", "32", "64", "4: 8", "16", "32", "Gavel, 4: 8")
    return Table(
        title,
        header,
        tuple(rows),
        tuple(figures),
        f"{len(elastic)} curves of ElasticFlow, {len(gavel)} of Gavel; fitted on 1, 2, 4, 8 GPUs or 1, 2, 4."
        " The figures have medians of absolute errors. Left out: each rate on up to 8 GPUs predicted from the"
        " others, root mean square of the logarithm of predicted over measured.",
    )
