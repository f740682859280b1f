"""Expansion of the entries of an ensemble file to its members."""

from __future__ import annotations

import itertools
import math
import os
import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hetctl.inputs.ensemble_schema import EnsembleModel
from hetctl.inputs.member_schema import (
    DrawModel,
    EntrySettings,
    FunctionsModel,
    GridEntry,
    GridModel,
    MemberModel,
    RandomEntry,
    RandomModel,
    Settings,
)
from hetctl.inputs.names import fitted, grid_names
from hetctl.inputs.quantities import parse_interval
from hetctl.inputs.yaml_source import Location
from hetctl.model.ensemble import Functions, Member, StopRule, TrainingCode

MOST_MEMBERS = 10_000
OF_CODE = frozenset({"framework", "functions", "data"})
"""Keys of an entry by which its members are trained by code of their own."""
MORE_IS_BETTER = ("acc", "auc", "f1", "precision", "recall")


class MemberEntry(NamedTuple):
    """Member to be created: its place in the file, its name, its config and its own settings."""

    where: Location
    name: str
    config: dict[str, Any]
    settings: EntrySettings


def count_members(ensemble: EnsembleModel) -> int:
    """Return the number of members of all entries, without creating them."""
    return sum(_count(entry) for entry in ensemble.members)


def _count(entry: MemberModel | GridEntry | RandomEntry) -> int:
    if isinstance(entry, GridEntry):
        return math.prod(len(values) for values in entry.grid.over.values())
    return entry.random.count if isinstance(entry, RandomEntry) else 1


def points_of(ensemble: EnsembleModel) -> Iterator[MemberEntry]:
    """Expand all entries, in the order of the file."""
    for index, entry in enumerate(ensemble.members):
        where: Location = ("members", index)
        if isinstance(entry, MemberModel):
            yield MemberEntry(where, entry.name, dict(entry.config), entry)
        elif isinstance(entry, GridEntry):
            yield from _grid_points((*where, "grid"), entry.grid)
        else:
            seed = _own(entry.random).get("seed", ensemble.seed)
            yield from _random_points((*where, "random"), entry.random, seed)


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

    Floats are rounded to six significant digits, so that differences between machines in the logarithm have
    no effect.
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
        # In this form no difference of the bounds is needed, which could overflow.
        value = (1 - share) * lower + share * upper
    # Rounding to six digits may leave the range.
    return float(min(upper, max(lower, float(f"{value:.6g}"))))


def members_of(ensemble: EnsembleModel, points: list[MemberEntry], folder: Path) -> list[Member]:
    """Combine each member's own settings with the ensemble's; its own take precedence.

    The seed is the CRC-32 of ``SEED/NAME``: it differs between members, and does not depend on other members.

    Parameters
    ----------
    folder : Path
        Folder to which paths of layer profiles are relative.
    """
    common = ensemble.model_dump(include=set(Settings.model_fields))
    return [
        replace(
            _member(common, point),
            layers=_layers(point, folder),
            profile_as=point.settings.profile_as,
            code=_code(ensemble, point, folder),
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


def code_of(framework: str, functions: FunctionsModel, data: str | None, folder: Path) -> TrainingCode:
    """Return framework, functions and data of a file; a relative path of data is relative to its folder."""
    located = data if data is None or "://" in data else os.path.normpath(folder / data)
    return TrainingCode(framework, Functions(**functions.model_dump()), located)


def _layers(point: MemberEntry, folder: Path) -> str | None:
    layers = point.settings.layers
    return None if layers is None else os.path.normpath(folder / layers)


def _member(common: dict[str, Any], point: MemberEntry) -> Member:
    own = _own(point.settings)
    merged = {**common, **own}
    # The built-in hash of text differs from process to process.
    seed = zlib.crc32(f"{merged.pop('seed')}/{point.name}".encode())
    stop = _stop_rule(common["stop"], own.get("stop", {}))
    variables = {**common["environment"], **own.get("environment", {})}
    del merged["gpus"]
    settings = {
        **merged,
        **_gpu_limits(common, own),
        "checkpoint": parse_interval(merged["checkpoint"]["every"]),
        "command": tuple(merged["command"] or ()),
        "environment": {name: str(value) for name, value in variables.items()},
    }
    return Member(**{**settings, "name": point.name, "config": point.config, "seed": seed, "stop": stop})


def _gpu_limits(common: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the least and the largest number of GPUs; limits of a member's own replace inherited `gpus`."""
    limits = {key: own.get(key, common[key]) for key in ("min_gpus", "max_gpus")}
    exact = own.get("gpus", None if limits.keys() & own.keys() else common["gpus"])
    return limits if exact is None else dict.fromkeys(limits, exact)


def _own(settings: Settings) -> dict[str, Any]:
    return settings.model_dump(include=set(Settings.model_fields), exclude_unset=True)


def _stop_rule(common: dict[str, Any], own: dict[str, Any]) -> StopRule:
    """Merge stop keys; a mode and a target for one metric are not inherited by another metric."""
    if own.get("metric", common["metric"]) != common["metric"]:
        # A target of an accuracy would end a member that is judged by its loss at once.
        common = {**common, "mode": None, "target": None}
    merged = {**common, **own}
    return StopRule(**{**merged, "mode": merged["mode"] or usual_mode(merged["metric"])})


def usual_mode(metric: str) -> str:
    """Return the direction in which a metric of this name is better: ``max`` or ``min``."""
    return "max" if any(word in metric.lower() for word in MORE_IS_BETTER) else "min"
