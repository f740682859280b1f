"""Reports of a member's command: lines of JSON on finished epochs, progress, and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LONGEST_LINE = 2**16
"""Bytes after which a line without an end is given up."""
SHOWN = 80
"""Characters of a wrong line that are shown."""


@dataclass(frozen=True)
class ScriptReport:
    """Report as `hetctl.script.report` writes it.

    Parameters
    ----------
    epoch : int or None
        Number of the epoch, from 1; None: there is only a checkpoint.
    samples, seconds : float or None
        Those of the epoch, or of the part that is done.
    finished : bool
        False for progress within the epoch.
    checkpoint : str or None
        Path of a checkpoint that is whole.
    """

    epoch: int | None
    metrics: Mapping[str, float]
    samples: float | None = None
    seconds: float | None = None
    finished: bool = True
    checkpoint: str | None = None


class WrongReportError(ValueError):
    """A line that is no report, with the rule that it breaks."""


def parse_report(line: bytes) -> ScriptReport:
    """Return the report in a line.

    Raises
    ------
    WrongReportError
        If it is none.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise WrongReportError("it is not JSON") from None
    if not isinstance(value, dict):
        raise WrongReportError("it is not a JSON object")
    checkpoint, finished = value.pop("checkpoint", None), value.pop("finished", True)
    if checkpoint is not None and not (isinstance(checkpoint, str) and checkpoint):
        raise WrongReportError("checkpoint must be a path")
    if not isinstance(finished, bool):
        raise WrongReportError("finished must be true or false")
    epoch = value.pop("epoch", None)
    only_checkpoint = checkpoint is not None and epoch is None and not value
    if not only_checkpoint and (type(epoch) is not int or epoch < 1):
        raise WrongReportError("epoch must be a whole number, from 1")
    samples, seconds = (_positive(value, key) for key in ("samples", "seconds"))
    for name, metric in value.items():
        if not _is_number(metric):
            raise WrongReportError(f"{name} must be a number")
    metrics = {name: float(metric) for name, metric in value.items()}
    return ScriptReport(epoch, metrics, samples, seconds, finished, checkpoint)


def shown(line: bytes) -> str:
    """Return the beginning of a line for messages, without characters that a terminal would obey."""
    text = line.decode(errors="replace")
    return "".join(char if char.isprintable() else "?" for char in text[:SHOWN])


class ReportLines:
    """Whole lines among the bytes that arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that are complete now; one that is too long is yielded in pieces."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            whole, self._rest = [*whole, self._rest], b""
        yield from (line for line in whole if line.strip())


def _positive(value: dict[str, Any], key: str) -> float | None:
    number = value.pop(key, None)
    if number is not None and not (_is_number(number) and 0 < number < float("inf")):
        raise WrongReportError(f"{key} must be a number above 0")
    return None if number is None else float(number)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
