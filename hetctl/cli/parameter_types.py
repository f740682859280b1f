"""Types of the commands' options, read by the rules of the file readers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from hetctl.model.errors import BadInputError
from hetctl.model.training_settings import AUTO

DAY_S = 86400
T = TypeVar("T")


def duration(value: str) -> int:
    """Parse ``2h``, ``90m`` or ``1:30:00``: seconds as an int."""
    from hetctl.inputs.quantities import parse_duration

    return _by_rule(parse_duration, value)


def gpus_by_type(value: str) -> dict[str, int]:
    """Parse ``80``, or ``v100:40,p100:40``: GPUs by type, "" if there is only one."""
    from hetctl.inputs.quantities import parse_gpus

    return _by_rule(parse_gpus, value)


def number_or_auto(value: str) -> int | str:
    """Parse ``4``, or ``auto``."""
    try:
        return value if value == AUTO else int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a whole number nor {AUTO}") from None


def seconds(least: float | None = None) -> Callable[[str], float]:
    """Return a parser of ``500``, ``2.5``, ``10m`` or ``30d``: seconds as a float.

    Parameters
    ----------
    least : float or None
        Smallest permitted value; None: anything above 0.
    """

    def parse(value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            days = value.removesuffix("d")
            found = DAY_S * int(days) if days.isdecimal() else duration(value)
        if not math.isfinite(found) or found < (least or 0) or (least is None and not found):
            rule = "above 0" if least is None else f"at least {least:g}"
            raise click.BadParameter(f"{value} is not a time of {rule} seconds")
        return found

    return parse


def _by_rule(parse: Callable[[str], T], value: str) -> T:
    try:
        return parse(value)
    except BadInputError as error:
        raise click.BadParameter("; ".join(filter(None, (error.message, error.hint)))) from None


class FiniteNumber(click.types.FloatParamType):
    """Option for a finite number: comparisons let NaN pass and, in an open range, infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class FiniteRange(FiniteNumber, click.FloatRange):
    """Option for a finite number in a range."""


class OutputFile(click.Path):
    """Option for a file to be written at the end, in an existing folder."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Raise BadInputError at once for a file that could not be written later."""
        path = Path(str(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"there is no folder {path.parent}", param, ctx)
        return path
