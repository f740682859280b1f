"""Points of a profile that can change a plan: which to measure, and how exactly."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from hetctl.model.ensemble import Ensemble
from hetctl.model.profile import ProfilePoint, RateShape
from hetctl.model.values import dataclass
from hetctl.perf.rate_extrapolation import usable_rates
from hetctl.perf.step_times import WANTED_ERROR

LARGEST_ERROR = 0.1
"""Largest error of a rate that may be wanted: planners weigh single members by their rates, too."""

Point = tuple[str, int]
"""Name of a shape's first member, and a number of GPUs."""


@dataclass(frozen=True)
class ShapeRates:
    """Known rates of the members of one shape, and their work.

    Parameters
    ----------
    member : str
        First member of the shape, which is measured.
    left : tuple of int
        Numbers of GPUs that may still be measured, in ascending order.
    rates : mapping of int to float
        Measured samples/s by number of GPUs.
    samples : float or None
        Samples that all its members train together; None: unknown.
    most_samples : float
        Samples of the member that trains most.
    """

    member: str
    left: tuple[int, ...]
    rates: Mapping[int, float]
    samples: float | None = None
    most_samples: float = 0.0

    @property
    def least_s(self) -> float:
        """Seconds of its longest member at the highest rate."""
        return self.most_samples / max(self.rates.values())

    @property
    def single_s(self) -> float:
        """Seconds of its longest member on the least number of GPUs that was measured."""
        return self.most_samples / self.rates[min(self.rates)]

    @property
    def gpu_s(self) -> float:
        """Least GPU-seconds of a sample."""
        return min(gpus / rate for gpus, rate in self.rates.items())


def worth_measuring(shapes: Iterable[ShapeRates], gpus: int) -> list[Point]:
    """Return the points to measure next, given all that is known; none if no other can change the plan.

    Each shape needs a rate. Then the makespan on `gpus` GPUs has a lower bound, at which every member is as
    efficient as on its best number of GPUs so far. A member that ends within it needs no more GPUs: only for
    the others is the next number measured. The longest member is measured on all numbers, for it shows how
    the networks scale.
    """
    shapes = list(shapes)
    if first := [shape for shape in shapes if not shape.rates and shape.left]:
        return [(shape.member, shape.left[0]) for shape in first]
    known = [shape for shape in shapes if shape.rates]
    on_several = [shape for shape in known if len(shape.rates) > 1 or _above(shape)]
    longest = max(on_several, key=lambda shape: shape.single_s, default=None)
    limit_s = (1 + WANTED_ERROR) * _bound_s(known, gpus)
    return [
        (shape.member, count)
        for shape in on_several
        for count in _above(shape)[: None if shape is longest else int(shape.least_s > limit_s)]
    ]


def _above(shape: ShapeRates) -> tuple[int, ...]:
    """Return the numbers of GPUs above all that were measured; between two of them rates are interpolated."""
    return tuple(count for count in shape.left if count > max(shape.rates))


def _bound_s(shapes: Collection[ShapeRates], gpus: int) -> float:
    """Return a lower bound of the makespan in seconds; 0 if the work of some shape is unknown."""
    if any(shape.samples is None for shape in shapes):
        return 0.0
    return math.fsum((shape.samples or 0.0) * shape.gpu_s for shape in shapes) / gpus


def shape_rates(
    ensemble: Ensemble,
    shapes: Iterable[RateShape],
    points: Iterable[ProfilePoint],
    left: Collection[Point],
) -> list[ShapeRates]:
    """Return what measured points say of the shapes.

    Parameters
    ----------
    points : iterable of ProfilePoint
        Points of the shapes' first members.
    left : collection of (str, int)
        Points that may still be measured.
    """
    measured: dict[str, list[ProfilePoint]] = defaultdict(list)
    for point in points:
        measured[point.member].append(point)
    counts: dict[str, list[int]] = defaultdict(list)
    for name, gpus in sorted(left):
        counts[name].append(gpus)
    epochs = {member.name: member.stop.planned_epochs for member in ensemble.members}
    return [_shape_rates(shape, epochs, measured[shape.member], counts[shape.member]) for shape in shapes]


def _shape_rates(
    shape: RateShape, planned: Mapping[str, int], points: list[ProfilePoint], left: list[int]
) -> ShapeRates:
    epoch = next((point.samples_per_epoch for point in points if point.samples_per_epoch), None)
    epochs = [planned[name] for name in (shape.member, *shape.shared_by)]
    return ShapeRates(
        member=shape.member,
        left=tuple(left),
        rates=usable_rates({point.gpus: point.rate for point in points}),
        samples=float(epoch * sum(epochs)) if epoch else None,
        most_samples=float((epoch or 1) * max(epochs)),
    )


def wanted_error(shapes: int) -> float:
    """Return how exactly the first rate of each shape is measured: half-width relative to the rate.

    The makespan goes by the sum of all members' work, in which independent errors cancel each other out.
    """
    return min(WANTED_ERROR * math.sqrt(max(shapes, 1)), LARGEST_ERROR)
