"""Step times of workers: CSV with the columns ``worker,batch,seconds`` and optionally ``max_batch``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from hetctl.inputs.csv_table import COUNT, Problem, Row, matching, number, read_table
from hetctl.inputs.input_errors import SourceLine, refuse
from hetctl.inputs.validation import NAME_RULE, SAFE_NAME
from hetctl.model.values import dataclass

NEEDED = {
    "worker": matching(SAFE_NAME, NAME_RULE),
    "batch": COUNT,
    "seconds": number(1e-9, 1e9, "must be a number from 1e-09 to 1e+09"),
}


@dataclass(frozen=True)
class WorkerPoints:
    """Measurements of a worker.

    Parameters
    ----------
    points : tuple of (batch, seconds)
        Measured points in ascending order of the batch.
    max_batch : int or None
        Largest batch that fits into its memory.
    place : SourceLine
        First line of the worker.
    """

    name: str
    points: tuple[tuple[int, float], ...]
    max_batch: int | None
    place: SourceLine


def read_workers(path: Path) -> list[WorkerPoints]:
    """Read the workers of a file, in the order of their first lines.

    Raises
    ------
    BadInputError
        If the file has errors, with a line for each: ``FILE:LINE: column: rule``.
    """
    rows, problems = read_table(path, NEEDED, {"max_batch": COUNT})
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[1]["worker"], []).append(row)
    for name, own in groups.items():
        problems += [*_disorder(name, own), *_caps(name, own)]
    refuse(problems)
    return [
        WorkerPoints(
            name,
            tuple((values["batch"], values["seconds"]) for _, values in own),
            own[0][1]["max_batch"],
            own[0][0],
        )
        for name, own in groups.items()
    ]


def _disorder(name: str, rows: list[Row]) -> Iterator[Problem]:
    for (earlier, before), (place, values) in pairwise(rows):
        if values["batch"] == before["batch"]:
            yield place, f"batch: worker '{name}' with {values['batch']} is already in line {earlier.line}"
        elif values["batch"] < before["batch"]:
            got = f"got {values['batch']} after {before['batch']} in line {earlier.line}"
            yield place, f"batch: must ascend for worker '{name}', {got}"


def _caps(name: str, rows: list[Row]) -> Iterator[Problem]:
    first, cap = rows[0][0], rows[0][1]["max_batch"]
    for place, values in rows:
        if values["max_batch"] != cap:
            got = f"got {values['max_batch'] or 'none'} here and {cap or 'none'} in line {first.line}"
            yield place, f"max_batch: must be the same in all rows of worker '{name}', {got}"
        elif cap is not None and values["batch"] > cap:
            yield place, f"batch: {values['batch']} is above the worker's max_batch of {cap}"
