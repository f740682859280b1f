"""Rules on keys of a member that depend on one another, whether they are its own or the ensemble's."""

from __future__ import annotations

from collections.abc import Iterator

from hetctl.inputs.ensemble_schema import EnsembleModel
from hetctl.inputs.member_entries import MemberEntry
from hetctl.inputs.yaml_source import Location
from hetctl.model.ensemble import Member

Problem = tuple[Location, str]


def batch_problems(
    model: EnsembleModel, points: list[MemberEntry], members: list[Member]
) -> Iterator[Problem]:
    """Yield the errors in batch sizes and learning rates, each once."""
    found: dict[Location, str] = {}
    for point, member in zip(points, members, strict=True):
        where = place_of("rescale_learning_rate", model, point)
        if where and member.global_batch_size and member.rescale_learning_rate:
            found[where] = (
                f"must not be true with global_batch_size ({member.global_batch_size}), which is the same on"
                " any number of GPUs: leave it out, or set batch_size alone"
            )
    yield from found.items()


def gpu_problems(model: EnsembleModel, points: list[MemberEntry], members: list[Member]) -> Iterator[Problem]:
    """Yield the errors in numbers of GPUs, each once."""
    found: dict[Location, str] = {}
    for where, settings in [((), model), *((point.where, point.settings) for point in points)]:
        limits = sorted({"min_gpus", "max_gpus"} & settings.model_fields_set)
        if settings.gpus is not None and limits:
            found[(*where, "gpus")] = f"is the exact number, and does not go with {' and '.join(limits)}"
    for point, member in zip(points, members, strict=True):
        places = [place_of(key, model, point) for key in ("gpus", "min_gpus", "max_gpus")]
        # The member's own key is the one to correct, which has the longest place.
        where = max((place for place in places if place), key=len, default=("min_gpus",))
        if where in found:
            continue
        for key, most in (("max_gpus", member.max_gpus), ("global_batch_size", member.global_batch_size)):
            if most is not None and member.min_gpus > most:
                found[where] = f"the least number of GPUs, {member.min_gpus}, must be at most {key}, {most}"
    yield from found.items()


def place_of(key: str, model: EnsembleModel, point: MemberEntry) -> Location | None:
    """Return where the file has the value of a member's key; None if it is the default."""
    if key in point.settings.model_fields_set:
        return (*point.where, key)
    return (key,) if key in model.model_fields_set else None
