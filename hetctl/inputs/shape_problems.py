"""Errors in what members share their measured rates: `profile_as` and `rate_keys`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hetctl.inputs.ensemble_schema import EnsembleModel
from hetctl.inputs.input_errors import suggestion
from hetctl.inputs.member_entries import MemberEntry
from hetctl.inputs.yaml_source import Location


def shape_problems(model: EnsembleModel, points: Sequence[MemberEntry]) -> Iterator[tuple[Location, str]]:
    """Yield the errors of `rate_keys`, and of `profile_as` in all entries, with their places."""
    known = {key for point in points for key in point.config}
    for index, key in enumerate(model.rate_keys or ()):
        if key not in known:
            yield ("rate_keys", index), f"no member has '{key}' in its config{suggestion(key, known)}"
    named = {point.name: point.settings.profile_as for point in points}
    for point in points:
        if rule := _problem_of(point.name, named):
            yield (*point.where, "profile_as"), rule


def _problem_of(name: str, named: Mapping[str, str | None]) -> str | None:
    """Return the error in a member's `profile_as`; None if it leads to a member with rates of its own."""
    chain = [name]
    while (following := named[chain[-1]]) is not None:
        if following not in named:
            # The error of another member on the way is reported at that member.
            return (
                f"there is no member '{following}'{suggestion(following, named)}" if chain == [name] else None
            )
        if following in chain:
            circle = " -> ".join([*chain[chain.index(following) :], following])
            return f"must lead to a member that is measured, not in a circle: {circle}"
        chain.append(following)
    return None
