"""Rules for members that are commands: all of an ensemble or none, and no placeholder without a value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetctl.inputs.ensemble_schema import EnsembleModel
from hetctl.inputs.input_errors import suggestion
from hetctl.inputs.member_entries import MemberEntry
from hetctl.inputs.yaml_source import Location
from hetctl.model.checkpoint_interval import EVERY_EPOCH
from hetctl.model.command_line import BUILT_IN, unknown_placeholders
from hetctl.model.ensemble import Member

OF_FUNCTIONS = ("framework", "functions", "data", "partitions")
"""Keys of an ensemble that hetctl's own training needs; a command reads and trains by itself."""


def command_problems(
    model: EnsembleModel, points: Sequence[MemberEntry], members: Sequence[Member]
) -> Iterator[tuple[Location, str]]:
    """Yield what is wrong with the commands of an ensemble file, each with its place."""
    without = [point for point, member in zip(points, members, strict=True) if not member.command]
    if len(without) == len(members):
        if model.functions is None:
            yield ("functions",), "is required, unless all members have a command"
        if model.environment:
            yield ("environment",), "needs a command, whose variables it sets"
        return
    for point in without:
        yield (
            (*point.where, "command"),
            f"is missing: all members have one, or none; {point.name} has none",
        )
    for key in OF_FUNCTIONS:
        if key in model.model_fields_set:
            yield (key,), "does not go with members that are commands"
    for point, member in zip(points, members, strict=True):
        yield from _problems_of(point, member)


def _problems_of(point: MemberEntry, member: Member) -> Iterator[tuple[Location, str]]:
    own = "command" in point.settings.model_fields_set
    where: Location = (*point.where, "command") if own else ("command",)
    for name in unknown_placeholders(member.command, member.config):
        likely = suggestion(name, {*member.config, *BUILT_IN})
        yield where, f"the config of {point.name} has no '{name}' for the placeholder {{{name}}}{likely}"
    for key in ("layers", "global_batch_size", "deterministic", "shard"):
        if getattr(member, key):
            yield (*point.where, key), "does not go with members that are commands"
    if member.checkpoint != EVERY_EPOCH:
        own = "checkpoint" in point.settings.model_fields_set
        of_checkpoint: Location = (*point.where, "checkpoint") if own else ("checkpoint",)
        yield of_checkpoint, "does not go with commands, which write their own"
