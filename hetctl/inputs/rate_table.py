"""Rate tables: CSV with the columns ``member,gpus,rate`` and optionally ``gpu_type,samples,busy``."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from hetctl.inputs.csv_table import COUNT, TEXT, Problem, matching, number, read_table, repeated
from hetctl.inputs.input_errors import SourceLine, refuse
from hetctl.inputs.validation import MEMBER_NAME, MEMBER_RULE
from hetctl.model.values import dataclass

NEEDED = {
    "member": matching(MEMBER_NAME, MEMBER_RULE),
    "gpus": COUNT,
    "rate": number(1e-9, 1e12, "must be a number from 1e-9 to 1e12 samples/s"),
}
OPTIONAL = {
    "gpu_type": TEXT,
    "samples": number(math.ulp(0.0), 1e15, "must be above 0, and at most 1e15"),
    "busy": number(1e-3, 1.0, "must be a share of the time from 0.001 to 1"),
}


@dataclass(frozen=True)
class RateRow:
    """Rate of a member on a number of GPUs.

    Parameters
    ----------
    rate : float
        Samples/s.
    samples : float or None
        Samples to convergence; equal in all rows of the member.
    busy : float or None
        Share of the time for which the member keeps its device busy alone on one GPU; in rows of one GPU.
    """

    member: str
    gpus: int
    rate: float
    gpu_type: str | None = None
    samples: float | None = None
    busy: float | None = None


def read_rates(path: Path, *, with_work: bool = False) -> list[RateRow]:
    """Read a rate table.

    Parameters
    ----------
    with_work : bool
        If true, the table must be complete: `samples` of each member, and rates on one type of GPU.

    Raises
    ------
    BadInputError
        If the file has errors, with a line for each: ``FILE:LINE: column: rule``.
    """
    records, problems = read_table(path, NEEDED, OPTIONAL)
    rows = [(place, RateRow(**values)) for place, values in records]
    problems += _contradictions(rows)
    problems += _gaps(rows) if with_work else []
    refuse(problems)
    return [row for _, row in rows]


def write_rates(rows: Iterable[RateRow], file: TextIO) -> None:
    """Write a table from which `read_rates` returns the same rows."""
    rows = list(rows)
    used = [name for name in OPTIONAL if any(getattr(row, name) is not None for row in rows)]
    columns = (*NEEDED, *used)
    # The csv module writes CRLF by default, on every system.
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([getattr(row, name) for name in columns] for row in rows)


def _contradictions(rows: list[tuple[SourceLine, RateRow]]) -> Iterator[Problem]:
    at = dict(rows)
    for place, earlier in repeated((place, (row.member, row.gpus, row.gpu_type)) for place, row in rows):
        on = f"{at[place].gpus} GPUs" + (f" ({at[place].gpu_type})" if at[place].gpu_type else "")
        yield place, f"member '{at[place].member}' on {on} is already in line {earlier.line}"
    for place, row in rows:
        if row.busy is not None and row.gpus > 1:
            yield place, f"busy: is of one GPU, got {row.busy} on {row.gpus} GPUs"
    for place, earlier in repeated((place, row.member) for place, row in rows):
        if at[earlier].samples != at[place].samples:
            rule = f"samples: must be the same in all rows of member '{at[place].member}'"
            yield (
                place,
                f"{rule}, got {at[place].samples} here and {at[earlier].samples} in line {earlier.line}",
            )


def _gaps(rows: list[tuple[SourceLine, RateRow]]) -> list[Problem]:
    """Return the first line of each member without a number of samples."""
    firsts = {row.member: (place, row) for place, row in reversed(rows)}
    return [
        (place, f"samples: member '{name}' has none, so its work is unknown")
        for name, (place, row) in firsts.items()
        if row.samples is None
    ]
