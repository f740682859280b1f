"""Reader of ensemble files, which define what is to be trained."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetctl.inputs.csv_table import TEXT, Column, read_table, repeated, whole_number
from hetctl.inputs.ensemble_schema import EnsembleModel, PartitionsModel
from hetctl.inputs.input_errors import SourceLine, refuse, shown, suggestion
from hetctl.inputs.member_entries import (
    MOST_MEMBERS,
    OF_CODE,
    MemberEntry,
    code_of,
    count_of,
    member_problems,
    members_of,
    points_of,
)
from hetctl.inputs.search_entries import SEARCH, as_trials, search_problems, trials_of
from hetctl.inputs.user_modules import candidates, module_file, parsed
from hetctl.inputs.validation import validate, value_of
from hetctl.inputs.yaml_source import Location, YamlSource, dotted, read_yaml
from hetctl.model.ensemble import COMMAND, Ensemble, Functions, Member, Partitions, TrainingCode
from hetctl.model.errors import BadInputError
from hetctl.model.training_settings import BalanceSettings


def _nodes(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(";")) if text else ()


SOURCE = Column(
    "must be absolute, or begin with a variable",
    lambda text: text.startswith(("/", "$")) and text.isprintable(),
)
PLACEMENT = {
    "partition": whole_number(0, "must be a whole number from 0"),
    "path": TEXT,
    "nodes": Column(
        "must be names separated by ';', each once, or empty",
        lambda text: (
            all(name.isprintable() and len(name.split()) == 1 for name in _nodes(text))
            and len(set(_nodes(text))) == len(_nodes(text))
        ),
        _nodes,
    ),
}
"""Columns of a file of partitions: paths on their nodes, with variables; no nodes if they are unknown."""


def read_partition_table(path: Path) -> Partitions:
    """Read a file with one line for each partition.

    Raises
    ------
    BadInputError
        If the file has errors, with a line for each: ``FILE:LINE: rule``.
    """
    rows, problems = read_table(path, PLACEMENT, {"source": SOURCE})
    at = dict(rows)
    found = {values["partition"]: values for values in at.values()}
    for place, earlier in repeated((place, values["partition"]) for place, values in rows):
        problems.append((place, f"partition {at[place]['partition']} is already in line {earlier.line}"))
    for place, earlier in repeated((place, values["path"]) for place, values in rows):
        # One copy would replace the other.
        if at[place]["source"] or at[earlier]["source"]:
            rule = f"path {shown(at[place]['path'])} is already in line {earlier.line}"
            problems.append((place, f"{rule}, and partitions that are copied need paths of their own"))
    missing = [] if problems else sorted(set(range(len(found))) - found.keys())
    problems += ((SourceLine(path, 1), f"partition {number} is missing") for number in missing)
    refuse(problems)
    placed = [found[number] for number in range(len(found))]
    return Partitions(
        len(placed),
        files=tuple(values["path"] for values in placed),
        nodes=tuple(values["nodes"] for values in placed),
        source_files=tuple(values["source"] or "" for values in placed),
    )


def read_ensemble(path: Path) -> Ensemble:
    """Read an ensemble file and check that its functions exist beside it.

    Raises
    ------
    BadInputError
        If the file has errors, with a line for each: ``FILE:LINE: key: rule``.
    """
    return ensemble_of(read_yaml(path))


def ensemble_of(source: YamlSource) -> Ensemble:
    """Return the ensemble that the keys of a file define; errors as of `read_ensemble`."""
    model = validate(EnsembleModel, source)
    if sum(map(count_of, model.members)) > MOST_MEMBERS:
        raise source.refusal([(("members",), f"must expand to at most {MOST_MEMBERS:,} members")])
    if wrong := list(search_problems(model)):
        raise source.refusal(wrong)
    try:
        trials = trials_of(model)
    except BadInputError as error:
        raise source.refusal([(SEARCH, error.message)]) from None
    folder = source.path.parent.resolve()
    code = TrainingCode(COMMAND, Functions("", ""))
    if model.functions:
        code = code_of(model.framework, model.functions, model.data, folder)
    points = [*points_of(model), *(trials.points if trials else ())]
    members = as_trials(members_of(model, points, folder), trials)
    problems = [
        *member_problems(model, points, members, code.framework),
        *_function_problems(model, points, folder),
        *_code_problems(model, points),
        *_name_problems(points),
        *_stop_problems(points, members),
        *_partition_problems(model),
    ]
    if problems:
        raise source.refusal(problems)
    partitions, how = None, model.partitions
    if how:
        numbered = Partitions(how.count or 0, how.path, how.source, how.replicas)
        partitions = read_partition_table(folder / how.file) if how.file else numbered
    return Ensemble(
        name=model.name,
        framework=code.framework,
        functions=code.functions,
        members=tuple(members),
        folder=str(folder),
        data=code.data,
        partitions=partitions,
        samples_per_epoch=model.samples_per_epoch,
        balance=value_of(BalanceSettings, model.balance),
        rate_keys=tuple(model.rate_keys or ()),
        search=trials.spec if trials else None,
        fuse=model.fuse,
        max_per_gpu=model.max_per_gpu,
    )


def ensemble_schema() -> dict[str, Any]:
    """Return the JSON Schema of ensemble files."""
    schema = EnsembleModel.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "hetctl ensemble"}


def _function_problems(
    model: EnsembleModel, points: list[MemberEntry], folder: Path
) -> Iterator[tuple[Location, str]]:
    entries = {point.where: point.settings.functions for point in points}
    for where, functions in {(): model.functions, **entries}.items():
        for role, function in vars(functions).items() if functions else ():
            problem = _entry_point_problem(function, folder) if function is not None else None
            if problem is not None:
                yield (*where, "functions", role), problem


def _code_problems(model: EnsembleModel, points: list[MemberEntry]) -> Iterator[tuple[Location, str]]:
    """Yield entries with code of their own in a file without functions for all members."""
    if model.functions is None:
        for where, settings in {point.where: point.settings for point in points}.items():
            for key in sorted(OF_CODE & settings.model_fields_set):
                yield (*where, key), "needs functions of the ensemble, which members without their own have"


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


def _file_problems(model: PartitionsModel, samples_per_epoch: int | None) -> Iterator[tuple[Location, str]]:
    """Yield the errors of `partitions` that concern `file`."""
    if model.file is None and model.count is None:
        yield ("partitions",), "needs count, or file"
    if model.file is None:
        return
    for key in sorted(model.model_fields_set - {"file"}):
        yield ("partitions", key), "does not go with file, which says how many there are, and where"
    if samples_per_epoch is None:
        yield ("partitions", "file"), "needs samples_per_epoch, the number of samples of all partitions"


def _partition_problems(model: EnsembleModel) -> Iterator[tuple[Location, str]]:
    if model.partitions:
        yield from _file_problems(model.partitions, model.samples_per_epoch)
    path, source = (model.partitions.path, model.partitions.source) if model.partitions else ("", "")
    if source and not SOURCE.holds(source):
        yield ("partitions", "source"), f"{SOURCE.rule}, got {shown(source)}"
    if source and "{partition}" not in Path(source).name:
        rule = "must have {partition} for the number of a partition in its last component"
        yield ("partitions", "source"), f"{rule}, got '{source}'"
    if source and not path:
        yield ("partitions", "source"), "needs path, to which the partitions are copied"
    if path and "{partition}" not in path:
        yield ("partitions", "path"), f"must have {{partition}} for the number of a partition, got '{path}'"
    if path and model.samples_per_epoch is None:
        # Profiling does not see the partitions of other nodes.
        yield ("partitions", "path"), "needs samples_per_epoch, the number of samples of all partitions"


def _entry_point_problem(function: str, folder: Path) -> str | None:
    """Return the error in ``module:function`` beside an ensemble file; None if there is none.

    None of the user's code is run.
    """
    module, name = function.split(":")
    path = module_file(module, folder)
    if path is None:
        return f"there is no {' or '.join(map(str, candidates(module)))} in this file's folder"
    file = path.relative_to(folder)
    finder = _Finder()
    try:
        finder.visit(parsed(path))
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    except SyntaxError as error:
        return f"{file} is not Python: {error.msg} in line {error.lineno}"
    # ast.parse raises ValueError for null bytes, and RecursionError or MemoryError for deeply nested code.
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{file} is not Python: {error}"
    if finder.names & {name, "*"}:
        return None
    return f"{file} defines no '{name}'" + suggestion(name, finder.names)


class _Finder(ast.NodeVisitor):
    """Visitor that collects the names bound at a module's top level; ``*`` for a star import."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.names.add(node.name)

    # These visitors do not visit the node's body, so that names inside of functions and classes do not count.
    visit_FunctionDef = _define  # noqa: N815
    visit_AsyncFunctionDef = _define  # noqa: N815
    visit_ClassDef = _define  # noqa: N815

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}

    visit_Import = _import  # noqa: N815
    visit_ImportFrom = _import  # noqa: N815

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.names.add(node.id)
