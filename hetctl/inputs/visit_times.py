"""Times of visits: unit times of each configuration on each partition, and logs of visits.

The first line tells which of three forms a file of unit times has: a CSV matrix, with or without names; two
whole numbers ``rows columns`` and then the times, the form of open-shop benchmarks; a CSV list with the
columns ``config,partition,worker,seconds``, for partitions that several workers have. A log of visits is JSON
lines, as written by ``hetctl simulate --trace``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from hetctl.inputs.csv_table import (
    NUMBER,
    TEXT,
    Column,
    Line,
    Problem,
    Row,
    csv_lines,
    number,
    ragged,
    read_table,
    repeated,
)
from hetctl.inputs.input_errors import SourceLine, read_text, refusal, refuse, shown, suggestion
from hetctl.inputs.validation import Strict, rules_of
from hetctl.model.hops import Visit
from hetctl.model.values import dataclass

SIZES = re.compile(r"\s*([0-9]{1,9})\s+([0-9]{1,9})\s*")
NEVER = ("", "inf")
"""Cells of a worker without the partition."""
# The limit keeps sums of times finite.
SECONDS = number(0, 1e12, "must be a number from 0 to 1e12")
SECONDS_OR_NEVER = Column(
    SECONDS.rule,
    lambda text: text.lower() in NEVER or SECONDS.holds(text),
    lambda text: None if text.lower() in NEVER else float(text),
)
COLUMNS = {"config": TEXT, "partition": TEXT, "worker": TEXT, "seconds": SECONDS_OR_NEVER}


@dataclass(frozen=True)
class UnitTimeTable:
    """Unit times of a file.

    Parameters
    ----------
    configs, partitions, workers : tuple of str
        Names in the order of the file; ``c0``, ``p0``, ``w0`` and so on if it has none.
    seconds : mapping of (int, int, int) to float
        Seconds by the indices of configuration, partition and worker; missing units cannot be trained there.
    """

    configs: tuple[str, ...]
    partitions: tuple[str, ...]
    workers: tuple[str, ...]
    seconds: Mapping[tuple[int, int, int], float]


def read_unit_times(path: Path) -> UnitTimeTable:
    """Read a file of unit times.

    Raises
    ------
    BadInputError
        If the file has errors, with a line for each: ``FILE:LINE: rule``.
    """
    text = read_text(path)
    numbered = [(SourceLine(path, i), line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    sizes = SIZES.fullmatch(numbered[0][1]) if numbered else None
    if sizes:
        rows = [(place, line.split()) for place, line in numbered[1:]]
        return _sized(numbered[0][0], int(sizes[1]), int(sizes[2]), rows)
    lines = [(place, cells) for place, cells in csv_lines(path, text) if cells != [""]]
    if not lines:
        raise refusal(
            [(SourceLine(path, 1), "is empty: it must have a row of seconds for each configuration")]
        )
    if sorted(lines[0][1]) == sorted(COLUMNS):
        return _list(path, text)
    return _named(lines)


def _sized(first: SourceLine, rows: int, columns: int, lines: Sequence[Line]) -> UnitTimeTable:
    if rows == 0 or columns == 0:
        raise refusal([(first, f"sizes must be at least 1 row and 1 column, got {rows} and {columns}")])
    problems = ragged(lines, columns, f"line {first.line} gives {columns} columns")
    if len(lines) != rows:
        problems.append((first, f"gives {rows} rows, but {len(lines)} follow"))
    refuse(problems)
    return _matrix(lines, _numbered("c", rows), _numbered("w", columns))


def _named(lines: Sequence[Line]) -> UnitTimeTable:
    """Read a matrix; its first line names the workers if it contains no number.

    Rows begin with the name of a configuration if the first line begins with ``config``, or if no row begins
    with a number.
    """
    (place, header), rows = lines[0], lines[1:]
    named = header[0] == "config" or bool(rows and not any(_is_time(cells[0]) for _, cells in rows))
    if all(_is_time(cell) for cell in header):
        refuse(ragged(lines, len(header), f"line {place.line} has {len(header)}"))
        return _matrix(lines, _numbered("c", len(lines)), _numbered("w", len(header)))
    if not named:
        refuse((place, f"{shown(c)} is a number among names") for c in header if NUMBER.fullmatch(c))
    refuse(ragged(rows, len(header), f"the header has {len(header)}"))
    workers = tuple(header[named:])
    if not rows or not workers:
        raise refusal([(place, "has no seconds below its header, or names no worker")])
    refuse(_wrong_names("worker", [(place, worker) for worker in workers]))
    if not named:
        return _matrix(rows, _numbered("c", len(rows)), workers)
    refuse(_wrong_names("config", [(place, cells[0]) for place, cells in rows]))
    times = [(place, cells[1:]) for place, cells in rows]
    return _matrix(times, tuple(cells[0] for _, cells in rows), workers)


def _matrix(lines: Sequence[Line], configs: tuple[str, ...], workers: tuple[str, ...]) -> UnitTimeTable:
    """Return a table in which each worker has one partition of its own."""
    problems = []
    for j, worker in enumerate(workers):
        if all(cells[j].lower() in NEVER for _, cells in lines):
            problems.append((lines[0][0], f"worker {shown(worker)} has no partition: all its times are inf"))
    for place, cells in lines if not problems else ():
        for worker, cell in zip(workers, cells, strict=True):
            if cell.lower() in NEVER:
                rule = "every configuration must visit every partition, and no other worker has this one"
                problems.append((place, f"worker {shown(worker)}: no time is given; {rule}"))
            elif not SECONDS.holds(cell):
                problems.append((place, f"worker {shown(worker)}: seconds {SECONDS.rule}, got {shown(cell)}"))
    refuse(problems)
    seconds = {(i, j, j): float(cell) for i, (_, cells) in enumerate(lines) for j, cell in enumerate(cells)}
    return UnitTimeTable(configs, _numbered("p", len(workers)), workers, seconds)


def _list(path: Path, text: str) -> UnitTimeTable:
    rows, problems = read_table(path, COLUMNS, {}, text)
    units = [(values["config"], values["partition"], values["worker"]) for _, values in rows]
    places = [place for place, _ in rows]
    for place, earlier in repeated(zip(places, units, strict=True)):
        problems.append((place, f"the same unit on the same worker is already in line {earlier.line}"))
    refuse(problems)
    configs, partitions, workers = (tuple(dict.fromkeys(column)) for column in zip(*units, strict=True))
    numbers = [{name: i for i, name in enumerate(names)} for names in (configs, partitions, workers)]
    seconds = {
        (numbers[0][config], numbers[1][partition], numbers[2][worker]): values["seconds"]
        for (config, partition, worker), (_, values) in zip(units, rows, strict=True)
        if values["seconds"] is not None
    }
    table = UnitTimeTable(configs, partitions, workers, seconds)
    refuse(_gaps(table, rows))
    return table


def _gaps(table: UnitTimeTable, rows: Sequence[Row]) -> Iterator[Problem]:
    """Yield the gaps in a list: a worker with a partition needs times of all configurations on it."""
    # The first line of each partition, of each worker, and of each pair; "" stands for any.
    places = {
        named: place
        for place, values in reversed(rows)
        for named in itertools.product((values["partition"], ""), (values["worker"], ""))
    }
    homes = sorted({(table.partitions[j], table.workers[k]) for _, j, k in table.seconds})
    times = {(table.configs[i], table.partitions[j], table.workers[k]) for i, j, k in table.seconds}
    for worker in set(table.workers).difference(worker for _, worker in homes):
        yield places["", worker], f"worker {shown(worker)} has no partition: it has no seconds, or only inf"
    for partition in set(table.partitions).difference(partition for partition, _ in homes):
        yield places[partition, ""], f"partition {shown(partition)} is on no worker"
    for partition, worker in homes:
        for config in table.configs:
            if (config, partition, worker) not in times:
                where = f"partition {shown(partition)} of worker {shown(worker)}"
                rule = f"config {shown(config)} has no seconds on {where}, unlike other configs"
                yield places[partition, worker], rule


def _wrong_names(kind: str, names: Sequence[tuple[SourceLine, str]]) -> Iterator[Problem]:
    seen: set[str] = set()
    for place, name in names:
        if name in seen:
            yield place, f"{kind}: {shown(name)} is given twice"
        elif not TEXT.holds(name):
            yield place, f"{kind}: {TEXT.rule}, got {shown(name)}"
        seen.add(name)


def _is_time(cell: str) -> bool:
    return NUMBER.fullmatch(cell) is not None or cell.lower() in (*NEVER, "nan", "-inf")


def _numbered(letter: str, count: int) -> tuple[str, ...]:
    return tuple(f"{letter}{i}" for i in range(count))


MOST_EPOCHS = 10_000
"""Largest number of epochs of a configuration."""
WORKER = re.compile(r".+:[0-9]+(\+[0-9]+)*")
"""Form of a worker of a run: its node, and the numbers of its GPUs."""
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _TraceLine(Strict):
    """Visit in a log; it is lost if a failure undid it."""

    model_config = ConfigDict(extra="ignore")
    config: str
    worker: str
    start: Seconds
    end: Seconds
    partition: str
    epoch: Annotated[int, Field(ge=0, le=MOST_EPOCHS - 1)]
    lost: bool

    @model_validator(mode="after")
    def _end_not_before_start(self) -> Self:
        if self.end < self.start:
            raise ValueError(f"end is {self.end:g}, before start, {self.start:g}")
        return self


TracedLine = tuple[SourceLine, _TraceLine]


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
    refuse([*_unknown(found, {"config": configs, "partition": partitions}), *_no_gpus(found)])
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
    refuse(_unknown(found, known))
    return _in_order_of_starts(path, found, _homeless(found, table))


def _valid_lines(path: Path) -> list[TracedLine]:
    found: list[TracedLine] = []
    problems: list[Problem] = []
    # splitlines() would also split at U+2028 and others, which may stand within JSON strings.
    for at, text in enumerate(read_text(path).split("\n"), 1):
        if not text.strip():
            continue
        place = SourceLine(path, at)
        try:
            found.append((place, _TraceLine.model_validate_json(text)))
        except ValidationError as error:
            problems += ((place, rule) for rule in rules_of(_TraceLine, error))
    refuse(problems)
    return found


def _in_order_of_starts(
    path: Path, found: Iterable[TracedLine], problems: Iterable[Problem] = ()
) -> list[Visit]:
    """Return the visits that were not lost, with new numbers."""
    done = [(place, line) for place, line in found if not line.lost]
    again = repeated((place, (line.config, line.epoch, line.partition)) for place, line in done)
    refuse(
        [
            *problems,
            *((place, f"the same unit is already done in line {first.line}") for place, first in again),
        ]
    )
    refuse([] if done else [(SourceLine(path, 1), "has no visit that was done")])
    done.sort(key=lambda each: (each[1].start, each[1].end))
    return [
        Visit(number, line.config, line.epoch, line.partition, line.worker)
        for number, (_, line) in enumerate(done)
    ]


def _unknown(lines: Sequence[TracedLine], kinds: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    """Yield the names that are not known, by kind, each at its first line."""
    for kind, names in kinds.items():
        first = {getattr(line, kind): place for place, line in reversed(lines)}
        for name in first.keys() - set(names):
            yield first[name], f"there is no {kind} {shown(name)}" + suggestion(name, names)


def _no_gpus(lines: Iterable[TracedLine]) -> Iterator[Problem]:
    for place, line in lines:
        if not WORKER.fullmatch(line.worker):
            yield place, f"worker must be NODE:GPU or NODE:GPU+GPU, got {shown(line.worker)}"


def _homeless(lines: Iterable[TracedLine], table: UnitTimeTable) -> Iterator[Problem]:
    homes = {(table.partitions[j], table.workers[k]) for _, j, k in table.seconds}
    for place, line in lines:
        if (line.partition, line.worker) not in homes:
            yield place, f"worker {shown(line.worker)} does not have partition {shown(line.partition)}"
