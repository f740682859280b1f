"""Log of visits: JSON lines, as written by ``hetctl simulate --trace``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetctl.inputs.csv_table import Problem
from hetctl.inputs.input_errors import SourceLine, read_text, refusal, shown, suggestion
from hetctl.inputs.unit_time_table import UnitTimeTable
from hetctl.model.hops import Unit, Visit

MOST_EPOCHS = 10_000
"""Largest number of epochs of a configuration."""
WORKER = re.compile(r".+:[0-9]+(\+[0-9]+)*")
"""Form of a worker of a run: its node, and the numbers of its GPUs."""


@dataclass(frozen=True)
class _TraceLine:
    """Line of the log.

    Parameters
    ----------
    lost : bool
        True if a failure undid the visit.
    """

    place: SourceLine
    visit: Visit
    start: float
    end: float
    lost: bool


def read_run_trace(path: Path, configs: Sequence[str], partitions: Sequence[str]) -> list[Visit]:
    """Read the visits of a trace that a run repeats, in an order in which they could start.

    Parameters
    ----------
    configs, partitions : sequence of str
        Names that the trace may have; its workers have the form ``NODE:GPU``, or ``NODE:GPU+GPU`` for groups.

    Raises
    ------
    BadInputError
        As in `read_visit_log`.
    """
    found = _valid_lines(path)
    _refuse([*_unknown(found, {"config": configs, "partition": partitions}), *_no_gpus(found)])
    return _in_order_of_starts(path, found)


def read_visit_log(path: Path, table: UnitTimeTable) -> list[Visit]:
    """Read the visits of a log that were not lost, in an order in which they could start.

    Keys other than those of a trace are ignored.

    Parameters
    ----------
    table : UnitTimeTable
        Units that can be visited.

    Raises
    ------
    BadInputError
        If no visit was completed, or if a line is invalid, visits a unit that the table does not have, or
        repeats a unit, with a line for each problem: ``FILE:LINE: rule``.
    """
    found = _valid_lines(path)
    known = {"config": table.configs, "partition": table.partitions, "worker": table.workers}
    _refuse(_unknown(found, known))
    return _in_order_of_starts(path, found, _homeless(found, table))


def _valid_lines(path: Path) -> list[_TraceLine]:
    found: list[_TraceLine] = []
    problems: list[Problem] = []
    for place, text in _texts(path):
        line = _line(place, text)
        if isinstance(line, _TraceLine):
            found.append(line)
        else:
            problems += ((place, rule) for rule in line)
    _refuse(problems)
    return found


def _in_order_of_starts(
    path: Path, found: Iterable[_TraceLine], problems: Iterable[Problem] = ()
) -> list[Visit]:
    """Return the visits that were not lost, with new numbers."""
    done = [line for line in found if not line.lost]
    _refuse([*problems, *_done_again(done)])
    _refuse([] if done else [(SourceLine(path, 1), "has no visit that was done")])
    done.sort(key=lambda line: (line.start, line.end))
    return [replace(line.visit, number=number) for number, line in enumerate(done)]


def _texts(path: Path) -> list[tuple[SourceLine, str]]:
    # splitlines() would also split at U+2028 and others, which may stand within JSON strings.
    lines = read_text(path).split("\n")
    return [(SourceLine(path, i), line) for i, line in enumerate(lines, 1) if line.strip()]


def _refuse(problems: Iterable[Problem]) -> None:
    found = list(problems)
    if found:
        raise refusal(found)


def _line(place: SourceLine, text: str) -> _TraceLine | list[str]:
    """Return the line of the log, or its errors."""
    try:
        data = json.loads(text)
    # Deeply nested JSON raises RecursionError.
    except (ValueError, RecursionError):
        return ["is not JSON"]
    if not isinstance(data, dict):
        return [f"must be an object with {', '.join(_FIELDS)}, got {shown(data)}"]
    rules = [
        f"{name} must be {rule}, got {shown(data[name])}" if name in data else f"{name} is missing"
        for name, (holds, rule) in _FIELDS.items()
        if name not in data or not holds(data[name])
    ]
    if not rules and data["end"] < data["start"]:
        rules = [f"end is {shown(data['end'])}, before start, {shown(data['start'])}"]
    if rules:
        return rules
    visit = Visit(place.line, data["config"], data["epoch"], data["partition"], data["worker"])
    return _TraceLine(place, visit, data["start"], data["end"], data["lost"])


def _unknown(lines: Iterable[_TraceLine], kinds: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    """Yield the names that are not known, by kind, each at its first line."""
    first: dict[tuple[str, str], SourceLine] = {}
    for line in lines:
        for kind in kinds:
            first.setdefault((kind, getattr(line.visit, kind)), line.place)
    for kind, names in kinds.items():
        for name in {name for of, name in first if of == kind}.difference(names):
            yield first[kind, name], f"there is no {kind} {shown(name)}" + suggestion(name, names)


def _no_gpus(lines: Iterable[_TraceLine]) -> Iterator[Problem]:
    for line in lines:
        if not WORKER.fullmatch(line.visit.worker):
            yield line.place, f"worker must be NODE:GPU or NODE:GPU+GPU, got {shown(line.visit.worker)}"


def _homeless(lines: Iterable[_TraceLine], table: UnitTimeTable) -> Iterator[Problem]:
    homes = {(table.partitions[j], table.workers[k]) for _, j, k in table.seconds}
    for line in lines:
        worker, partition = line.visit.worker, line.visit.partition
        if (partition, worker) not in homes:
            yield line.place, f"worker {shown(worker)} does not have partition {shown(partition)}"


def _done_again(lines: Iterable[_TraceLine]) -> Iterator[Problem]:
    first: dict[Unit, SourceLine] = {}
    for line in lines:
        earlier = first.setdefault(line.visit.unit, line.place)
        if earlier != line.place:
            yield line.place, f"the same unit is already done in line {earlier.line}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_time(value: Any) -> bool:
    return (_is_whole(value) or isinstance(value, float)) and 0 <= value < math.inf


_TEXT, _TIME = (_is_text, "text"), (_is_time, "a number of seconds from 0")
_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "config": _TEXT,
    "worker": _TEXT,
    "start": _TIME,
    "end": _TIME,
    "partition": _TEXT,
    "epoch": (
        lambda v: _is_whole(v) and 0 <= v < MOST_EPOCHS,
        f"a whole number from 0 to {MOST_EPOCHS - 1:,}",
    ),
    "lost": (lambda v: isinstance(v, bool), "true or false"),
}
