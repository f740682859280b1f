"""Log of visits: JSON lines, as written by ``hetctl hopper --trace``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetctl.inputs.csv_table import Problem
from hetctl.inputs.input_errors import SourceLine, read_text, refusal, shown, suggestion
from hetctl.inputs.unit_time_table import UnitTimeTable

MOST_EPOCHS = 10_000
"""Largest number of epochs of a configuration."""
WORKER = re.compile(r".+:[0-9]+(\+[0-9]+)*")
"""Form of a worker of a run: its node, and the numbers of its GPUs."""


@dataclass(frozen=True)
class LoggedVisit:
    """Line of the log.

    Parameters
    ----------
    lost : bool
        True if a failure undid the visit.
    """

    config: str
    worker: str
    start: float
    end: float
    partition: str
    epoch: int
    lost: bool

    @property
    def unit(self) -> tuple[str, int, str]:
        """Unit that was trained: configuration, epoch and partition; each is trained once."""
        return self.config, self.epoch, self.partition


PlacedVisit = tuple[SourceLine, LoggedVisit]


def read_run_trace(path: Path, configs: Sequence[str], partitions: Sequence[str]) -> list[LoggedVisit]:
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


def read_visit_log(path: Path, table: UnitTimeTable) -> list[LoggedVisit]:
    """Read the visits of a log that were not lost, in an order in which they could start.

    Keys other than those of `LoggedVisit` are ignored.

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


def _valid_lines(path: Path) -> list[PlacedVisit]:
    found: list[PlacedVisit] = []
    problems: list[Problem] = []
    for place, line in _lines(path):
        visit = _visit(line)
        if isinstance(visit, LoggedVisit):
            found.append((place, visit))
        else:
            problems += ((place, rule) for rule in visit)
    _refuse(problems)
    return found


def _in_order_of_starts(
    path: Path, found: Iterable[PlacedVisit], problems: Iterable[Problem] = ()
) -> list[LoggedVisit]:
    """Return the visits that were not lost."""
    done = [(place, visit) for place, visit in found if not visit.lost]
    _refuse([*problems, *_done_again(done)])
    _refuse([] if done else [(SourceLine(path, 1), "has no visit that was done")])
    return sorted((visit for _, visit in done), key=lambda visit: (visit.start, visit.end))


def _lines(path: Path) -> list[tuple[SourceLine, str]]:
    # splitlines() would also split at U+2028 and others, which may stand within JSON strings.
    lines = read_text(path).split("\n")
    return [(SourceLine(path, i), line) for i, line in enumerate(lines, 1) if line.strip()]


def _refuse(problems: Iterable[Problem]) -> None:
    found = list(problems)
    if found:
        raise refusal(found)


def _visit(line: str) -> LoggedVisit | list[str]:
    """Return the visit of a line, or the errors of the line."""
    try:
        data = json.loads(line)
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
    return rules or LoggedVisit(**{name: data[name] for name in _FIELDS})


def _unknown(visits: Iterable[PlacedVisit], kinds: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    """Yield the names that are not known, by kind, each at its first line."""
    first: dict[tuple[str, str], SourceLine] = {}
    for place, visit in visits:
        for kind in kinds:
            first.setdefault((kind, getattr(visit, kind)), place)
    for kind, names in kinds.items():
        for name in {name for of, name in first if of == kind}.difference(names):
            yield first[kind, name], f"there is no {kind} {shown(name)}" + suggestion(name, names)


def _no_gpus(visits: Iterable[PlacedVisit]) -> Iterator[Problem]:
    for place, visit in visits:
        if not WORKER.fullmatch(visit.worker):
            yield place, f"worker must be NODE:GPU or NODE:GPU+GPU, got {shown(visit.worker)}"


def _homeless(visits: Iterable[PlacedVisit], table: UnitTimeTable) -> Iterator[Problem]:
    homes = {(table.partitions[j], table.workers[k]) for _, j, k in table.seconds}
    for place, visit in visits:
        if (visit.partition, visit.worker) not in homes:
            yield place, f"worker {shown(visit.worker)} does not have partition {shown(visit.partition)}"


def _done_again(visits: Iterable[PlacedVisit]) -> Iterator[Problem]:
    first: dict[tuple[str, int, str], SourceLine] = {}
    for place, visit in visits:
        earlier = first.setdefault(visit.unit, place)
        if earlier != place:
            yield place, f"the same unit is already done in line {earlier.line}"


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
