"""Training rates of members that were not measured, from those of the most similar ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hetctl.model.profile import MemberProfile
from hetctl.perf.seen_rates import known_rates

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


def predicted_profile(member: str, nearest: MemberProfile) -> MemberProfile:
    """Return the profile of a member that was not measured: that of the nearest one, as seen in training.

    The nearest one's work is not taken over.
    """
    return replace(
        known_rates(nearest),
        member=member,
        samples=None,
        seen_rates={},
        seen_overhead_s=None,
        predicted_from=nearest.member,
    )


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
    # Lists of other lengths, and empty mappings, must not compare as if they were not there.
    yield (*at, "length"), f"{type(value).__name__} of {len(value)}"
    for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves(each, (*at, key))


def _difference(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0
