"""Shapes of members: those of one shape train at the same rates, so that one of them is measured for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.serialization import encode

LEARNING_RATES = ("learning_rate", "lr", "base_lr", "initial_learning_rate", "initial_lr", "max_lr", "min_lr")
COEFFICIENTS = ("beta_1", "beta_2", "beta1", "beta2", "betas", "rho", "epsilon", "eps")
SEEDS = ("seed", "random_seed", "random_state")
RATE_NEUTRAL = frozenset((*LEARNING_RATES, *COEFFICIENTS, *SEEDS))
"""Names of config keys that do not change the rate, at any depth; `rate_keys` replaces this table."""
RATE_SWITCHES = frozenset(
    ("dropout", "dropout_rate", "l1", "l2", "label_smoothing", "momentum", "weight_decay")
)
"""Names of config keys that count only as 0 or not, which switches a layer or a term off or on; likewise."""


@dataclass(frozen=True)
class RateShape:
    """Members that train at the same rates.

    Parameters
    ----------
    member : str
        The first of them with a config of this shape, which is measured for all.
    shared_by : tuple of str
        The others, in the ensemble's order.
    max_gpus : int or None
        Largest number of GPUs that any of them may get; None: no limit.
    min_gpus : int
        Least number of GPUs that any of them may get.
    """

    member: str
    shared_by: tuple[str, ...]
    max_gpus: int | None
    min_gpus: int = 1


def rate_config(member: Member, rate_keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the part of a member's config that can change its rate.

    Parameters
    ----------
    rate_keys : tuple of str
        Keys that count; empty: all except `RATE_NEUTRAL`, and of `RATE_SWITCHES` only whether they are 0.
    """
    config: dict[str, Any] = encode(member.config)
    if rate_keys:
        return {key: value for key, value in config.items() if key in rate_keys}
    kept: dict[str, Any] = _without_neutral(config)
    return kept


def compared_config(member: Member, rate_keys: tuple[str, ...]) -> dict[str, Any]:
    """Return all values by which rates of members without a profile are predicted."""
    return {"config": rate_config(member, rate_keys), "batch_size": member.batch_size}


def shape_digest(member: Member, rate_keys: tuple[str, ...]) -> str:
    """Return a digest of a member's shape: its fingerprint with nothing but `rate_config` of its config."""
    return member.digest_with(rate_config(member, rate_keys))


def measured_members(ensemble: Ensemble) -> dict[str, Member]:
    """Return by name whose rates each member has: its own, or those of the one `profile_as` leads to."""
    members = {member.name: member for member in ensemble.members}
    return {name: _end_of_chain(member, members) for name, member in members.items()}


def shapes_of(ensemble: Ensemble) -> tuple[RateShape, ...]:
    """Return the shapes of an ensemble, in the order of their first members."""
    groups: dict[str, list[Member]] = {}
    measured = measured_members(ensemble)
    digests = {name: shape_digest(member, ensemble.rate_keys) for name, member in measured.items()}
    for member in ensemble.members:
        groups.setdefault(digests[member.name], []).append(member)
    return tuple(map(_shape, groups.values()))


def some_of(members: Sequence[str], most: int) -> str:
    """Return the first of some names as text, with the number of the others: ``a, b, c and 97 more``."""
    rest = len(members) - most
    return ", ".join(members[:most]) + (f" and {rest} more" if rest > 0 else "")


def _end_of_chain(member: Member, members: Mapping[str, Member]) -> Member:
    while member.profile_as is not None:
        member = members[member.profile_as]
    return member


def _shape(group: list[Member]) -> RateShape:
    # A member with `profile_as` may have a config of another shape; the one it leads to is in the group.
    first = next(member for member in group if member.profile_as is None)
    limits = [limit for limit in map(_gpu_limit, group) if limit is not None]
    return RateShape(
        first.name,
        tuple(member.name for member in group if member is not first),
        max(limits) if len(limits) == len(group) else None,
        min(member.min_gpus for member in group),
    )


def _gpu_limit(member: Member) -> int | None:
    return min(filter(None, (member.max_gpus, member.global_batch_size)), default=None)


def _without_neutral(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: bool(each) if key in RATE_SWITCHES else _without_neutral(each)
            for key, each in value.items()
            if key not in RATE_NEUTRAL
        }
    return [_without_neutral(each) for each in value] if isinstance(value, list) else value
