"""Reader of ensemble files, which define what is to be trained."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetctl.inputs.check_entry_points import problem_with
from hetctl.inputs.ensemble_schema import EnsembleModel
from hetctl.inputs.member_entries import MOST_MEMBERS, MemberEntry, count_members, members_of, points_of
from hetctl.inputs.validation import validate
from hetctl.inputs.yaml_source import Location, dotted, read_yaml
from hetctl.model.ensemble import Ensemble, Functions, Member


def read_ensemble(path: Path) -> Ensemble:
    """Read an ensemble file and check that its functions exist beside it.

    Raises
    ------
    BadInputError
        If the file has errors, with a line for each: ``FILE:LINE: key: rule``.
    """
    source = read_yaml(path)
    model = validate(EnsembleModel, source)
    if count_members(model) > MOST_MEMBERS:
        raise source.refusal([(("members",), f"must expand to at most {MOST_MEMBERS:,} members")])
    folder = path.parent.resolve()
    points = list(points_of(model))
    members = members_of(model, points, folder)
    problems = [
        *_function_problems(model, folder),
        *_name_problems(points),
        *_stop_problems(points, members),
    ]
    if problems:
        raise source.refusal(problems)
    return Ensemble(
        name=model.name,
        framework=model.framework,
        functions=Functions(**model.functions.model_dump()),
        members=tuple(members),
        folder=str(folder),
        data=None if model.data is None else _located(model.data, folder),
        partitions=model.partitions,
        samples_per_epoch=model.samples_per_epoch,
    )


def ensemble_schema() -> dict[str, Any]:
    """Return the JSON Schema of ensemble files."""
    schema = EnsembleModel.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "hetctl ensemble"}


def _located(data: str, folder: Path) -> str:
    # normpath would collapse the two slashes of an address.
    return data if "://" in data else os.path.normpath(folder / data)


def _function_problems(model: EnsembleModel, folder: Path) -> Iterator[tuple[Location, str]]:
    for role, function in model.functions:
        problem = problem_with(function, folder) if function is not None else None
        if problem is not None:
            yield ("functions", role), problem


def _name_problems(points: list[MemberEntry]) -> Iterator[tuple[Location, str]]:
    firsts: dict[str, Location] = {}
    for point in points:
        if point.name in firsts:
            first = dotted(firsts[point.name])
            yield (*point.where, "name"), f"member '{point.name}' is already defined by {first}"
        firsts.setdefault(point.name, point.where)


def _stop_problems(points: list[MemberEntry], members: list[Member]) -> Iterator[tuple[Location, str]]:
    for point, member in zip(points, members, strict=True):
        expected, most = member.stop.expected_epochs, member.stop.max_epochs
        if expected is not None and expected > most:
            own = "stop" in point.settings.model_fields_set
            where: Location = (*point.where, "stop") if own else ("stop",)
            yield (*where, "expected_epochs"), f"must be at most max_epochs ({most}), got {expected}"
