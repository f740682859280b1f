"""Rates in place of profiled ones: those seen in training, and those of other members."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hetctl.model.profile import SIZES, MemberProfile
from hetctl.model.training_progress import EpochHistory, EpochResult, TimedRate

NOTEWORTHY = 0.2
"""Relative error of a rate above which it is reported."""

Rates = Mapping[int, float]


def seen_rates(epochs: Iterable[EpochResult | TimedRate], batch_size: int) -> dict[str, dict[int, float]]:
    """Return the rates of epochs by type and number of GPUs: medians of the newest ones.

    A rate changes with the members that run beside it, and one on a GPU that was shared is left out. The type
    is "" at a site with one type, and for groups on several types.

    Parameters
    ----------
    epochs : iterable of EpochResult or TimedRate
        Epochs of one member and rates timed within them, in order of time.
    batch_size : int
        Batch size; epochs with another one are ignored.
    """
    rates: dict[str, dict[int, float]] = defaultdict(dict)
    for (gpu_type, gpus, size), newest in EpochHistory.of(epochs).rates.items():
        # After running out of memory, a member trains with smaller batches, at another rate.
        if gpus and size == batch_size:
            rates[gpu_type][gpus] = statistics.median(newest)
    return dict(rates)


def seen_overhead_s(epochs: Iterable[EpochResult | TimedRate], batch_size: int) -> float | None:
    """Return the median of the newest epochs' seconds beyond their samples; None if unknown."""
    newest = EpochHistory.of(epochs).overheads_s.get(batch_size)
    return statistics.median(newest) if newest else None


def known_rates(
    profile: MemberProfile,
    epochs: Iterable[EpochResult | TimedRate] = (),
    batch_size: int = 0,
    *,
    in_lockstep: bool = False,
) -> MemberProfile:
    """Return a profile with values that were observed in earlier runs, and in the epochs of this one.

    Parameters
    ----------
    epochs, batch_size
        Same as in `seen_rates`.
    in_lockstep : bool
        True if the epochs had the pace of a flotilla's slowest member. Their rates are then lower bounds of
        the member's own, and count only where they are above those known before.
    """
    epochs = EpochHistory.of(epochs)
    seen = {gpu_type: dict(rates) for gpu_type, rates in profile.seen_rates.items()}
    now = seen_rates(epochs, batch_size)
    if in_lockstep:
        now = _higher(now, _with_rates(profile, seen))
    for gpu_type, rates in now.items():
        seen[gpu_type] = {**seen.get(gpu_type, {}), **rates}
    overhead_s = seen_overhead_s(epochs, batch_size)
    if overhead_s is None:
        overhead_s = profile.seen_overhead_s
    if overhead_s is not None:
        # It includes evaluation and checkpoint, so neither may be added again.
        profile = replace(profile, epoch_s=max(0.0, overhead_s - profile.evaluate_s), save_s=0.0)
    return _with_rates(profile, seen)


def _higher(seen: Mapping[str, Rates], known: MemberProfile) -> dict[str, dict[int, float]]:
    """Return the rates that are above those of a profile."""
    return {
        gpu_type: {
            gpus: rate
            for gpus, rate in rates.items()
            if rate > (known.rates_by_type.get(gpu_type) or known.rates).get(gpus, math.inf)
        }
        for gpu_type, rates in seen.items()
    }


def _with_rates(profile: MemberProfile, seen: Mapping[str, Rates]) -> MemberProfile:
    """Return a profile with its rates corrected by observed ones."""
    if not seen:
        return profile
    by_type = {
        gpu_type: corrected(rates, seen.get(gpu_type, {}))
        for gpu_type, rates in profile.rates_by_type.items()
    }
    # With rates by type, a rate without a type was seen on several types at once, and holds for none.
    untyped = {} if profile.rates_by_type else seen.get("", {})
    typed = {gpu_type: rates for gpu_type, rates in seen.items() if gpu_type}
    if typed and not profile.rates:
        # The types of a member without a profile are those that it has trained on.
        by_type = {gpu_type: dict(rates) for gpu_type, rates in typed.items()} if len(typed) > 1 else {}
        return replace(profile, rates=dict(next(iter(typed.values()))), rates_by_type=by_type)
    own = {**untyped, **seen.get(profile.gpu_type or "", {})}
    return replace(profile, rates=corrected(profile.rates, own), rates_by_type=by_type)


def corrected(profiled: Rates, seen: Rates) -> dict[int, float]:
    """Return profiled rates, replaced by observed ones where there are any.

    Load from other members slows a member down on any number of GPUs. A rate that was profiled but not
    observed is therefore corrected by the factor of the nearest observed number of GPUs. If the profiled
    rate there was too low by accident, the factor would make other rates superlinear; they are therefore
    limited to growth in proportion to the GPUs.
    """
    rates = {gpus: _corrected(gpus, rate, profiled, seen) for gpus, rate in profiled.items()}
    return dict(sorted({**rates, **seen}.items()))


def _corrected(gpus: int, rate: float, profiled: Rates, seen: Rates) -> float:
    known = [other for other in seen if other in profiled]
    if not known:
        return rate
    # Of two equally near numbers the smaller one counts, whatever the order of the mapping.
    nearest = min(known, key=lambda other: (abs(other - gpus), other))
    factor = seen[nearest] / profiled[nearest]
    in_proportion = seen[nearest] * gpus / nearest
    if gpus > nearest:
        return min(rate * factor, max(rate, in_proportion))
    return max(rate * factor, min(rate, in_proportion))


def is_noteworthy(planned: float, seen: float) -> bool:
    """Return true if a planned rate differs from the observed one by more than `NOTEWORTHY` of the latter."""
    return abs(planned - seen) > NOTEWORTHY * seen


Key = tuple[str | int, ...]


def nearest_config(wanted: Mapping[str, Any], measured: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the name of the measured config that is nearest to the wanted one; None if none compares.

    Configs compare if they have the same keys, at all depths, and the same values that are not numbers.
    Their distance is the Euclidean one of the relative differences |a - b| / max(|a|, |b|) of their numbers.
    Of equally near ones the first counts.

    Parameters
    ----------
    wanted : mapping
        JSON values by key.
    measured : mapping
        Such mappings by name.
    """
    numbers, rest = _parted(wanted)
    distances: dict[str, float] = {}
    for name, config in measured.items():
        others, other_rest = _parted(config)
        if other_rest == rest and others.keys() == numbers.keys():
            distances[name] = math.hypot(*(_difference(numbers[key], others[key]) for key in numbers))
    return min(distances, key=distances.__getitem__, default=None)


USUAL_LEVEL = math.log(100.0), 3.0
"""Logarithm of a rate in samples/s before any is known, and its standard error."""
LEVEL_ERROR, LEVEL_POINTS = 0.3, 5
"""Standard error of the logarithm of a rate by the regression, which is what configs do not tell of it; it
counts as much as so many residuals."""
ANY_LEVEL = 10.0
"""Standard error of that logarithm in the regression, so that one rate tells the level of all others."""
SLOPE, SIZE_SLOPE = (0.0, 1.0), (-0.5, 0.5)
"""Means and standard deviations of the regression's factors, those of a config's numbers last: most of them
are sizes of the network, and a rate in inverse proportion to a number has the factor -1."""


class Level(NamedTuple):
    """Estimate of a rate: its natural logarithm, and the standard error of that."""

    log: float
    spread: float


def estimated_levels(
    configs: Mapping[str, Mapping[str, Any]], known: Mapping[str, float]
) -> dict[str, Level]:
    """Return the rates of members from those of others, by a regression over their configs.

    It is linear in the logarithms of the numbers of a config, and in indicators of its other values. Its
    factors have normal distributions, so one rate is enough; where configs tell nothing, members are equal.

    On one core, estimates from 1, 3 and 6 known rates were off by 78, 51 and 22 % for the digits example, and
    189, 76 and 65 % for 19 networks of six kinds (medians).

    Parameters
    ----------
    configs : mapping
        Of each member, JSON values by key (`compared_config`).
    known : mapping of str to float
        Rates in samples/s of some of them.

    Returns
    -------
    levels : dict of str to Level
        Of the others.
    """
    import numpy as np

    features = {name: _features(config) for name, config in configs.items()}
    found = sorted({key for each in features.values() for key in each}, key=repr)
    rows = np.array([[each.get(key, 0.0) for key in found] for each in features.values()])
    rows = rows.reshape(len(features), -1)
    rows = np.hstack([np.ones((len(rows), 1)), rows - rows.mean(axis=0)])
    index = {name: at for at, name in enumerate(features)}
    numbers = {at for config in configs.values() for at in _parted(config)[0] if at[0] == SIZES}
    before = [(USUAL_LEVEL[0], ANY_LEVEL), *(SIZE_SLOPE if at in numbers else SLOPE for at in found)]
    means, spreads = np.array(before).T
    measured = rows[[index[name] for name in known]]
    off = np.log(list(known.values())) - measured @ means
    prior, error = np.diag(spreads**-2), LEVEL_ERROR
    for _ in range(2):
        covariance = np.linalg.inv(prior + measured.T @ measured / error**2)
        factors = covariance @ measured.T @ off / error**2
        squares = LEVEL_POINTS * LEVEL_ERROR**2 + float(np.sum((off - measured @ factors) ** 2))
        error = math.sqrt(squares / (LEVEL_POINTS + len(off)))
    variances = np.einsum("ij,jk,ik->i", rows, covariance, rows) + error**2
    logs = rows @ (factors + means)
    return {
        name: Level(float(logs[at]), math.sqrt(variances[at]))
        for name, at in index.items()
        if name not in known
    }


def _features(config: Mapping[str, Any]) -> dict[Any, float]:
    """Return the logarithms of the numbers of a config, and 1 for each other value."""
    numbers, rest = _parted(config)
    logs = {at: math.log(abs(number)) if number else 0.0 for at, number in numbers.items()}
    return logs | dict.fromkeys(rest.items(), 1.0)


def _parted(config: Mapping[str, Any]) -> tuple[dict[Key, float], dict[Key, Any]]:
    """Return the numbers of a config, and its other values, by their paths."""
    values = dict(_leaves(config, ()))
    # In Python true is a number, too.
    numbers = {at: v for at, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    return numbers, {at: value for at, value in values.items() if at not in numbers}


def _leaves(value: Any, at: Key) -> Iterator[tuple[Key, Any]]:
    if not isinstance(value, (Mapping, list)):
        yield at, value
        return
    # Lists of other lengths, and empty mappings, must count.
    yield (*at, "length"), f"{type(value).__name__} of {len(value)}"
    for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves(each, (*at, key))


def _difference(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0
