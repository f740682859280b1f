"""Members that differ in their seed alone, and their results taken together."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hetctl.model.values import dataclass

QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond, the normal one is near enough."""


@dataclass(frozen=True)
class Spread:
    """Mean of values, and how sure it is.

    Parameters
    ----------
    deviation : float or None
        Standard deviation of the sample; None: there is one value.
    half_width : float or None
        Half of the width of the mean's 95 % confidence interval, by Student's t; None: there is one value.
    """

    count: int
    mean: float
    deviation: float | None
    half_width: float | None

    @property
    def excludes_zero(self) -> bool:
        """True if the confidence interval does not hold 0."""
        return self.half_width is not None and abs(self.mean) > self.half_width


@dataclass(frozen=True)
class SeedGroup:
    """Best values of the members that differ in their seed alone.

    Parameters
    ----------
    group : str
        Name of the first of them.
    members : tuple of str
        All of them, also those without a value yet.
    best : Spread or None
        Their best values of `metric`; None: none has one.
    """

    group: str
    members: tuple[str, ...]
    metric: str
    best: Spread | None


@dataclass(frozen=True)
class PairedSeeds:
    """Difference between two runs of members that differ in their seed alone, seed by seed.

    Parameters
    ----------
    run, other : str
        The runs; the difference is `other` less `run`.
    difference : Spread
        Differences of the best values of the members that both runs have.
    """

    group: str
    metric: str
    run: str
    other: str
    difference: Spread


def spread_of(values: Sequence[float]) -> Spread | None:
    """Return mean, deviation and interval of values; None without any."""
    if not values:
        return None
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Spread(1, mean, None, None)
    deviation = statistics.stdev(values)
    quantile = QUANTILES[count - 2] if count - 2 < len(QUANTILES) else statistics.NormalDist().inv_cdf(0.975)
    return Spread(count, mean, deviation, quantile * deviation / math.sqrt(count))


def groups_of(members: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the members of each group, from names and groups of members; most have none."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, group in members:
        if group:
            found[group].append(name)
    return dict(found)


def paired(
    group: str, members: Iterable[str], metric: str, runs: Sequence[tuple[str, Mapping[str, float]]]
) -> list[PairedSeeds]:
    """Compare the best values of a group in the first run with those in each other one, seed by seed."""
    (run, first), *others = runs
    names = list(members)
    found = []
    for other, best in others:
        both = [name for name in names if name in first and name in best]
        if difference := spread_of([best[name] - first[name] for name in both]):
            found.append(PairedSeeds(group, metric, run, other, difference))
    return found
