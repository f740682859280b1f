"""Rates that were seen in training, and what epochs took besides, take the place of what was profiled."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from hetctl.model.profile import MemberProfile
from hetctl.model.training_progress import EpochResult

RECENT = 3
"""The rate is the median of so many epochs, the newest: what runs beside a member changes."""
NOTEWORTHY = 0.2
"""A rate that was off by more than this share is worth a word."""

Rates = Mapping[int, float]


def seen_rates(epochs: Iterable[EpochResult], batch_size: int) -> dict[str, dict[int, float]]:
    """Return the rates of epochs by type of GPU ("" where a site has one), by number of GPUs.

    Parameters
    ----------
    epochs : iterable of EpochResult
        Of one member, in order of time.
    batch_size : int
        Epochs with another batch size do not count.
    """
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for epoch in epochs:
        if epoch.rate and epoch.batch_size == batch_size:
            found[epoch.gpu_type or "", epoch.gpus].append(epoch.rate)
    rates: dict[str, dict[int, float]] = defaultdict(dict)
    for (gpu_type, gpus), values in found.items():
        rates[gpu_type][gpus] = statistics.median(values[-RECENT:])
    return dict(rates)


def seen_overhead_s(epochs: Iterable[EpochResult], batch_size: int) -> float | None:
    """Return what the newest epochs took beyond their samples, as the median; None if nobody knows."""
    found = [e.overhead_s for e in epochs if e.overhead_s is not None and e.batch_size == batch_size]
    return statistics.median(found[-RECENT:]) if found else None


def known_rates(
    profile: MemberProfile, epochs: Iterable[EpochResult] = (), batch_size: int = 0
) -> MemberProfile:
    """Return a profile with what was seen in earlier runs, and in the epochs of this one, in its place.

    Parameters
    ----------
    epochs, batch_size
        As in `seen_rates`.
    """
    epochs = tuple(epochs)
    profile = _with_overhead(profile, seen_overhead_s(epochs, batch_size))
    seen = {gpu_type: dict(rates) for gpu_type, rates in profile.seen_rates.items()}
    for gpu_type, rates in seen_rates(epochs, batch_size).items():
        seen[gpu_type] = {**seen.get(gpu_type, {}), **rates}
    if not seen:
        return profile
    by_type = {
        gpu_type: corrected(rates, seen.get(gpu_type, {}))
        for gpu_type, rates in profile.rates_by_type.items()
    }
    own = {**seen.get("", {}), **seen.get(profile.gpu_type or "", {})}
    return replace(profile, rates=corrected(profile.rates, own), rates_by_type=by_type)


def _with_overhead(profile: MemberProfile, overhead_s: float | None) -> MemberProfile:
    """Return a profile with what epochs took beyond their samples, in this run or else in earlier ones."""
    seen_s = profile.seen_overhead_s if overhead_s is None else overhead_s
    if seen_s is None:
        return profile
    return replace(profile, epoch_s=max(0.0, seen_s - profile.evaluate_s), save_s=0.0)


def corrected(profiled: Rates, seen: Rates) -> dict[int, float]:
    """Return profiled rates with those that were seen in their place.

    What runs beside a member slows it down on any number of GPUs. So a rate that was profiled and not
    seen is corrected by the factor of the nearest number of GPUs that was; but if a profiled rate was too
    low by accident, others must not become superlinear by its factor, so that they grow no further than in
    proportion to the GPUs.
    """
    rates = {gpus: _corrected(gpus, rate, profiled, seen) for gpus, rate in profiled.items()}
    return dict(sorted({**rates, **seen}.items()))


def _corrected(gpus: int, rate: float, profiled: Rates, seen: Rates) -> float:
    known = [other for other in seen if other in profiled]
    if not known:
        return rate
    nearest = min(known, key=lambda other: (abs(other - gpus), other))
    factor = seen[nearest] / profiled[nearest]
    in_proportion = seen[nearest] * gpus / nearest
    if gpus > nearest:
        return min(rate * factor, max(rate, in_proportion))
    return max(rate * factor, min(rate, in_proportion))


def is_noteworthy(planned: float, seen: float) -> bool:
    """Return true if a plan's rate was off by more than `NOTEWORTHY` of what was seen."""
    return abs(planned - seen) > NOTEWORTHY * seen
