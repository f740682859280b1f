"""Order of points with several losses: fronts, and the crowding distance (NSGA-II, Deb et al., 2002).

ASHA promotes by it as in Schmucker et al., "Multi-objective Asynchronous Successive Halving" (2021).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Losses = tuple[float, ...]


def dominates(one: Losses, other: Losses) -> bool:
    """Return true if a point is nowhere worse than another one, and better somewhere; less is better."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def front_of(points: Mapping[int, Losses]) -> list[int]:
    """Return the points that no other one dominates, in their order."""
    # Only a point before it in the order of losses can dominate another.
    front: list[int] = []
    for number in sorted(points, key=lambda each: points[each]):
        if not any(dominates(points[other], points[number]) for other in front):
            front.append(number)
    kept = {*front}
    return [number for number in points if number in kept]


def pareto_order(points: Mapping[int, Losses]) -> list[int]:
    """Return the points by fronts, the best first; in a front those farthest from others first."""
    left, order = dict(sorted(points.items())), list[int]()
    while left:
        front = front_of(left)
        distances = _crowding([left[number] for number in front])
        ranks = sorted(zip(front, distances, strict=True), key=lambda each: (-each[1], each[0]))
        order += [number for number, _ in ranks]
        left = {number: losses for number, losses in left.items() if number not in {*front}}
    return order


def _crowding(front: Sequence[Losses]) -> list[float]:
    """Return the crowding distance of each point of a front; infinite for those with the least of a loss."""
    distances = [0.0] * len(front)
    for losses in zip(*front, strict=True):
        order = sorted(range(len(front)), key=losses.__getitem__)
        width = losses[order[-1]] - losses[order[0]]
        distances[order[0]] = distances[order[-1]] = math.inf
        for before, at, after in zip(order, order[1:], order[2:], strict=False):
            distances[at] += (losses[after] - losses[before]) / width if width else 0.0
    return distances
