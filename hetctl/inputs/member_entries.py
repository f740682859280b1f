"""Members of an ensemble file: expansion of its entries, and rules between keys."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hetctl.inputs.ensemble_schema import EnsembleModel
from hetctl.inputs.input_errors import suggestion
from hetctl.inputs.member_schema import (
    DrawModel,
    Entry,
    EntrySettings,
    GridEntry,
    GridModel,
    MemberModel,
    RandomEntry,
    RandomModel,
    Settings,
)
from hetctl.inputs.quantities import parse_interval
from hetctl.inputs.user_modules import framework_of
from hetctl.inputs.validation import value_of
from hetctl.inputs.yaml_source import Location
from hetctl.model.combinations import NO_DIVISION, OWN_CODE, conflicts
from hetctl.model.ensemble import Functions, Member, StopRule, TrainingCode
from hetctl.model.interpreter import python_start
from hetctl.model.training_settings import (
    BUILT_IN,
    EVERY_EPOCH,
    FRAMEWORKS,
    NO_RANKS,
    ON,
    RANKS,
    KeepSettings,
    Resume,
    placeholders,
)

MOST_MEMBERS = 10_000
OF_CODE = frozenset({"framework", "functions", "data"})
"""Keys of an entry that give its members code of their own."""
MORE_IS_BETTER = ("acc", "auc", "f1", "precision", "recall")


class MemberEntry(NamedTuple):
    """Member to be created: its place in the file, its name, its config and its own settings."""

    where: Location
    name: str
    config: dict[str, Any]
    settings: EntrySettings
    seeds_of: str = ""


def count_of(entry: Entry) -> int:
    """Return the number of members of an entry, without creating them."""
    if isinstance(entry, GridEntry):
        return entry.grid.seeds * math.prod(map(len, entry.grid.over.values()))
    return entry.random.seeds * entry.random.count if isinstance(entry, RandomEntry) else entry.seeds


def points_of(ensemble: EnsembleModel) -> Iterator[MemberEntry]:
    """Expand all entries, in the order of the file."""
    for index, entry in enumerate(ensemble.members):
        for point in _points(("members", index), entry, ensemble.seed):
            yield from _seeds(point, point.settings.seeds)


def _points(where: Location, entry: Entry, common_seed: int) -> Iterator[MemberEntry]:
    if isinstance(entry, MemberModel):
        yield MemberEntry(where, entry.name, dict(entry.config), entry)
    elif isinstance(entry, GridEntry):
        yield from _grid_points((*where, "grid"), entry.grid)
    else:
        seed = _own(entry.random).get("seed", common_seed)
        yield from _random_points((*where, "random"), entry.random, seed)


def _seeds(point: MemberEntry, count: int) -> Iterator[MemberEntry]:
    """Yield a member as often as it has seeds; the first keeps its name, so that a run may get more."""
    if count == 1:
        yield point
        return
    for number in range(count):
        name = fitted(f"{point.name}-seed-{number}", [point.name, number]) if number else point.name
        yield point._replace(name=name, config=dict(point.config), seeds_of=point.name)


def _grid_points(where: Location, grid: GridModel) -> Iterator[MemberEntry]:
    points = [dict(zip(grid.over, values, strict=True)) for values in itertools.product(*grid.over.values())]
    for name, point in zip(grid_names(grid.name, points), points, strict=True):
        yield MemberEntry(where, name, {**grid.config, **point}, grid)


def _random_points(where: Location, sample: RandomModel, seed: int) -> Iterator[MemberEntry]:
    for index in range(sample.count):
        drawn = {key: draw(how, seed, index, key) for key, how in sample.over.items()}
        name = fitted(f"{sample.name}-{index:03d}", [sample.name, index])
        yield MemberEntry(where, name, {**sample.config, **drawn}, sample)


def draw(how: DrawModel, seed: int, index: int, key: str) -> Any:
    """Draw a value that depends only on the arguments.

    Floats are rounded to six significant digits, so that machines whose logarithms differ draw the same.
    """
    (kind,) = how.model_fields_set
    values = getattr(how, kind)
    share = random.Random(f"{seed}/{index}/{key}").random()
    if kind == "choice":
        return values[int(share * len(values))]
    lower, upper = values
    if kind == "integer":
        # For wide ranges the product may be rounded up to the number of values, one beyond the last.
        return min(upper, lower + int(share * (upper - lower + 1)))
    if kind == "log_uniform":
        value = math.exp((1 - share) * math.log(lower) + share * math.log(upper))
    else:
        # The difference of the bounds could overflow.
        value = (1 - share) * lower + share * upper
    # Rounding to six digits may leave the range.
    return float(min(upper, max(lower, float(f"{value:.6g}"))))


def members_of(ensemble: EnsembleModel, points: list[MemberEntry], folder: Path) -> list[Member]:
    """Combine each member's settings with the ensemble's; the member's take precedence.

    The seed is the CRC-32 of ``SEED/NAME``: it differs between members, and does not depend on other members.

    Parameters
    ----------
    folder : Path
        Folder to which paths of layer profiles are relative.
    """
    common = ensemble.model_dump(include=set(Settings.model_fields))
    return [
        _member(
            common,
            point,
            layers=point.settings.layers and os.path.normpath(folder / point.settings.layers),
            profile_as=point.settings.profile_as,
            code=_code(ensemble, point, folder),
            seeds_of=point.seeds_of,
        )
        for point in points
    ]


def _code(ensemble: EnsembleModel, point: MemberEntry, folder: Path) -> TrainingCode | None:
    """Return the code of a member that differs from its ensemble's."""
    own = point.settings
    if ensemble.functions is None or not OF_CODE & own.model_fields_set:
        return None
    common, code = (
        code_of(framework, functions, data, folder)
        for framework, functions, data in (
            (ensemble.framework, ensemble.functions, ensemble.data),
            (
                own.framework or ensemble.framework,
                own.functions or ensemble.functions,
                ensemble.data if own.data is None else own.data,
            ),
        )
    )
    return None if code == common else code


def code_of(framework: str | None, functions: Functions, data: str | None, folder: Path) -> TrainingCode:
    """Return framework, functions and data of a file; a path of data is relative to the file's folder.

    Parameters
    ----------
    framework : str or None
        Name in the file; None: the one that the functions need.
    """
    located = data if data is None or "://" in data else os.path.normpath(folder / data)
    chosen = value_of(Functions, functions)
    return TrainingCode(framework or framework_of(chosen, folder), chosen, located)


def _member(common: dict[str, Any], point: MemberEntry, **more: Any) -> Member:
    own = _own(point.settings)
    merged = {**common, **own}
    del merged["gpus"]
    variables = {**common["environment"], **own.get("environment", {})}
    command, limits = tuple(merged["command"] or ()), _gpu_limits(common, own)
    if command and limits["max_gpus"] is None:
        # Each of its ranks is a start of the script, which may know none.
        limits["max_gpus"] = limits["min_gpus"]
    settings = {
        **merged,
        **limits,
        # The built-in hash of text differs from process to process.
        "seed": zlib.crc32(f"{merged['seed']}/{point.name}".encode()),
        "stop": _stop_rule(common["stop"], own.get("stop", {})),
        "checkpoint": parse_interval(merged["checkpoint"]["every"]),
        "keep": KeepSettings(**{**common["keep"], **own.get("keep", {})}),
        "command": command,
        "preload": tuple(merged["preload"]),
        "resume": Resume(merged["resume"]["checkpoint"], tuple(merged["resume"]["options"] or ())),
        "environment": {name: str(value) for name, value in variables.items()},
    }
    return Member(point.name, point.config, **settings, **more)


def _gpu_limits(common: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the least and the largest number of GPUs; a member's own limits replace inherited `gpus`."""
    limits = {key: own.get(key, common[key]) for key in ("min_gpus", "max_gpus")}
    exact = own.get("gpus", None if limits.keys() & own.keys() else common["gpus"])
    return limits if exact is None else dict.fromkeys(limits, exact)


def _own(settings: Settings) -> dict[str, Any]:
    return settings.model_dump(include=set(Settings.model_fields), exclude_unset=True)


def _stop_rule(common: dict[str, Any], own: dict[str, Any]) -> StopRule:
    """Merge stop keys; another metric inherits neither mode nor target."""
    if own.get("metric", common["metric"]) != common["metric"]:
        # A target for the accuracy would at once end a member that is judged by its loss.
        common = {**common, "mode": None, "target": None}
    merged = {**common, **own}
    return StopRule(**{**merged, "mode": merged["mode"] or usual_mode(merged["metric"])})


def usual_mode(metric: str) -> str:
    """Return the direction in which a metric of this name is better: ``max`` or ``min``."""
    return "max" if any(word in metric.lower() for word in MORE_IS_BETTER) else "min"


LONGEST_NAME = 64
"""Most characters of a member's name."""


def grid_names(prefix: str, points: list[dict[str, Any]]) -> list[str]:
    """Name every point of a grid ``<prefix>-<key>-<value>...``, with its keys in the order of the file.

    A name depends on its own point alone. Where two points would get the same name, both end with a hash of
    their values, as do names that would be longer than 64 characters.
    """
    plain = ["-".join([prefix, *(f"{_slug(k)}-{_slug(v)}" for k, v in point.items())]) for point in points]
    uses = Counter(plain)
    return [fitted(name, point, hashed=uses[name] > 1) for name, point in zip(plain, points, strict=True)]


def fitted(name: str, values: Any, hashed: bool = False) -> str:
    """Return the name, cut to 64 characters with a hash of `values` where it is longer."""
    if len(name) <= LONGEST_NAME and not hashed:
        return name
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}-{digest}"


def _slug(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    return text if safe == text else safe.strip("-")


Problem = tuple[Location, str]
PAIRED = (
    *("command", "layers", "global_batch_size", "deterministic", "shard", "rescale_learning_rate"),
    *("checkpoint", "ranks", "resume", "preload"),
)
"""Keys of members that conflict with some others."""
NEUTRAL = (None, False, (), EVERY_EPOCH, RANKS, Resume())
"""Values of these that conflict with none."""


def member_problems(
    model: EnsembleModel, points: list[MemberEntry], members: list[Member], framework: str
) -> Iterator[Problem]:
    """Yield the errors of an ensemble's members, each with its place.

    Parameters
    ----------
    points : list of MemberEntry
        Entries of the file that define the members, in the same order.
    """
    yield from _command_problems(model, points, members)
    yield from _pair_problems(model, points, members, framework)
    yield from _gpu_problems(model, points, members)
    yield from _shape_problems(model, points)


def _pair_problems(
    model: EnsembleModel, points: list[MemberEntry], members: list[Member], framework: str
) -> Iterator[Problem]:
    """Yield keys that conflict with another, each place once."""
    found: dict[Location, str] = {}
    common: dict[str, Location] = {
        key: (key,) for key in model.model_fields_set.difference(PAIRED) if getattr(model, key)
    }
    if model.balance.mode == ON:
        common["balance: on"] = ("balance",)
    for point, member in zip(points, members, strict=True):
        given = [key for key in PAIRED if getattr(member, key) not in NEUTRAL]
        places = common | {key: place for key in given if (place := _place_of(key, model, point))}
        if member.code:
            places[OWN_CODE] = (*point.where, min(OF_CODE & point.settings.model_fields_set))
        entry = FRAMEWORKS.get(member.code.framework if member.code else framework)
        if entry is None or not entry.can_divide:
            places[NO_DIVISION] = ()
        for each in conflicts(places):
            found.setdefault(places[each.one], f"does not go with {each.other}: {each.reason}; {each.hint}")
    yield from found.items()


def _gpu_problems(
    model: EnsembleModel, points: list[MemberEntry], members: list[Member]
) -> Iterator[Problem]:
    found: dict[Location, str] = {}
    for where, settings in [((), model), *((point.where, point.settings) for point in points)]:
        limits = sorted({"min_gpus", "max_gpus"} & settings.model_fields_set)
        if settings.gpus is not None and limits:
            found[(*where, "gpus")] = f"is the exact number, and does not go with {' and '.join(limits)}"
    for point, member in zip(points, members, strict=True):
        places = [_place_of(key, model, point) for key in ("gpus", "min_gpus", "max_gpus")]
        # The key to correct is the member's own, which has the longest place.
        where = max((place for place in places if place), key=len, default=("min_gpus",))
        if where in found:
            continue
        for key, most in (("max_gpus", member.max_gpus), ("global_batch_size", member.global_batch_size)):
            if most is not None and member.min_gpus > most:
                found[where] = f"the least number of GPUs, {member.min_gpus}, must be at most {key}, {most}"
        if member.ranks == NO_RANKS and (member.min_gpus, member.max_gpus) != (1, 1):
            found[where] = "must be 1, or left out, for a command with ranks: none"
    yield from found.items()


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
    for point, member in zip(points, members, strict=True):
        if member.preload and not python_start(member.command):
            place = _place_of("preload", model, point) or ("preload",)
            yield place, "needs a command that begins with python, and runs a .py file or a module (-m)"
        where: Location = (
            (*point.where, "command") if "command" in point.settings.model_fields_set else ("command",)
        )
        known = {*member.config, *BUILT_IN}
        for name in placeholders((*member.command, *member.resume.options)):
            if name not in known:
                rule = f"the config of {point.name} has no '{name}' for the placeholder {{{name}}}"
                yield where, f"{rule}{suggestion(name, known)}; as text it is {{{{{name}}}}}"


def _place_of(key: str, model: EnsembleModel, point: MemberEntry) -> Location | None:
    """Return where the file has the value of a member's key; None if it is the default."""
    if key in point.settings.model_fields_set:
        return (*point.where, key)
    return (key,) if key in model.model_fields_set else None
