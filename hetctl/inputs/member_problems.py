"""Rules on keys of a member that depend on one another, whether they are its own or the ensemble's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hetctl.inputs.ensemble_schema import EnsembleModel
from hetctl.inputs.input_errors import suggestion
from hetctl.inputs.member_entries import MemberEntry
from hetctl.inputs.yaml_source import Location
from hetctl.model.ensemble import Member
from hetctl.model.training_settings import BUILT_IN, EVERY_EPOCH, FRAMEWORKS, ON, unknown_placeholders

Problem = tuple[Location, str]
OF_FUNCTIONS = ("framework", "functions", "data", "partitions")
"""Keys of an ensemble that hetctl's own training needs; a command reads and trains by itself."""


def member_problems(
    model: EnsembleModel, points: list[MemberEntry], members: list[Member]
) -> Iterator[Problem]:
    """Yield the errors of an ensemble's members, each with its place.

    Parameters
    ----------
    points : list of MemberEntry
        Entries of the file that define the members, in the same order.
    """
    yield from _command_problems(model, points, members)
    yield from _batch_problems(model, points, members)
    yield from _gpu_problems(model, points, members)
    yield from _shard_problems(model, points, members)
    yield from _shape_problems(model, points)


def _batch_problems(
    model: EnsembleModel, points: list[MemberEntry], members: list[Member]
) -> Iterator[Problem]:
    """Yield the errors in batch sizes and learning rates, each once."""
    found: dict[Location, str] = {}
    for point, member in zip(points, members, strict=True):
        where = _place_of("rescale_learning_rate", model, point)
        if where and member.global_batch_size and member.rescale_learning_rate:
            found[where] = (
                f"must not be true with global_batch_size ({member.global_batch_size}), which is the same on"
                " any number of GPUs: leave it out, or set batch_size alone"
            )
    yield from found.items()


def _gpu_problems(
    model: EnsembleModel, points: list[MemberEntry], members: list[Member]
) -> Iterator[Problem]:
    """Yield the errors in numbers of GPUs, each once."""
    found: dict[Location, str] = {}
    for where, settings in [((), model), *((point.where, point.settings) for point in points)]:
        limits = sorted({"min_gpus", "max_gpus"} & settings.model_fields_set)
        if settings.gpus is not None and limits:
            found[(*where, "gpus")] = f"is the exact number, and does not go with {' and '.join(limits)}"
    for point, member in zip(points, members, strict=True):
        places = [_place_of(key, model, point) for key in ("gpus", "min_gpus", "max_gpus")]
        # The member's own key is the one to correct, which has the longest place.
        where = max((place for place in places if place), key=len, default=("min_gpus",))
        if where in found:
            continue
        for key, most in (("max_gpus", member.max_gpus), ("global_batch_size", member.global_batch_size)):
            if most is not None and member.min_gpus > most:
                found[where] = f"the least number of GPUs, {member.min_gpus}, must be at most {key}, {most}"
    yield from found.items()


def _shard_problems(
    model: EnsembleModel, points: list[MemberEntry], members: list[Member]
) -> Iterator[Problem]:
    """Yield what does not go with `shard`, each place once; commands have their own rules."""
    found: dict[Location, str] = {}
    for point, member in zip(points, members, strict=True):
        where = _place_of("shard", model, point)
        if where is None or not member.shard or member.command:
            continue
        rule = next((rule for is_broken, rule in _shard_rules(model, member) if is_broken), None)
        if rule is not None:
            found[where] = f"must not be true {rule}"
    yield from found.items()


def _shard_rules(model: EnsembleModel, member: Member) -> tuple[tuple[bool, str], ...]:
    """Return rules, each with true if it is broken."""
    framework = member.code.framework if member.code else model.framework
    dividing = [entry.name for entry in FRAMEWORKS.values() if entry.can_divide]
    return (
        (
            framework not in dividing,
            f"with framework {framework}, which cannot divide a network; leave it out, or use"
            f" {' or '.join(dividing)}",
        ),
        (
            model.partitions is not None,
            "with partitions, which have unequal numbers of batches: leave it out, or give all nodes"
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


def _shape_problems(model: EnsembleModel, points: Sequence[MemberEntry]) -> Iterator[Problem]:
    """Yield the errors of `rate_keys`, and of `profile_as` in all entries, with their places."""
    known = {key for point in points for key in point.config}
    for index, key in enumerate(model.rate_keys or ()):
        if key not in known:
            yield ("rate_keys", index), f"no member has '{key}' in its config{suggestion(key, known)}"
    named = {point.name: point.settings.profile_as for point in points}
    for point in points:
        if rule := _shape_problem(point.name, named):
            yield (*point.where, "profile_as"), rule


def _shape_problem(name: str, named: Mapping[str, str | None]) -> str | None:
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


def _command_problems(
    model: EnsembleModel, points: Sequence[MemberEntry], members: Sequence[Member]
) -> Iterator[Problem]:
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
        yield from _problems_of_command(point, member)


def _problems_of_command(point: MemberEntry, member: Member) -> Iterator[Problem]:
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


def _place_of(key: str, model: EnsembleModel, point: MemberEntry) -> Location | None:
    """Return where the file has the value of a member's key; None if it is the default."""
    if key in point.settings.model_fields_set:
        return (*point.where, key)
    return (key,) if key in model.model_fields_set else None
