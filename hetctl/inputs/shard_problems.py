"""Rules for members whose parameters are divided among their GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from hetctl.inputs.ensemble_schema import EnsembleModel
from hetctl.inputs.member_entries import MemberEntry
from hetctl.inputs.member_problems import Problem, place_of
from hetctl.inputs.yaml_source import Location
from hetctl.model.balance_settings import ON
from hetctl.model.ensemble import Member

PYTORCH = "pytorch"


def shard_problems(
    model: EnsembleModel, points: list[MemberEntry], members: list[Member]
) -> Iterator[Problem]:
    """Yield what does not go with `shard`, each place once; commands have their own rules."""
    found: dict[Location, str] = {}
    for point, member in zip(points, members, strict=True):
        where = place_of("shard", model, point)
        if where is None or not member.shard or member.command:
            continue
        rule = next((rule for is_broken, rule in _rules(model, member) if is_broken), None)
        if rule is not None:
            found[where] = f"must not be true {rule}"
    yield from found.items()


def _rules(model: EnsembleModel, member: Member) -> tuple[tuple[bool, str], ...]:
    """Return rules, each with true if it is broken."""
    framework = member.code.framework if member.code else model.framework
    return (
        (
            framework != PYTORCH,
            f"with framework {framework}: only PyTorch can divide a network; leave it out, or use {PYTORCH}",
        ),
        (
            model.partitions is not None,
            "with partitions, whose parts have unequal numbers of batches: leave it out, or give all nodes"
            " the whole data",
        ),
        (
            member.layers is not None,
            f"with layers ({member.layers}), by which pipelines are cut: leave one of them out",
        ),
        (
            model.balance.mode == ON,
            "with balance on: GPUs wait for one another in each layer, so that their own speeds are unknown;"
            " leave it out, or set balance to auto or off",
        ),
    )
