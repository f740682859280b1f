"""Types of the commands' options, read by the rules of the file readers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from hetctl.model.errors import BadInputError

DAY_S = 86400


class Duration(click.ParamType):  # type: ignore[type-arg]
    """Option ``2h``, ``90m`` or ``1:30:00``: seconds as an int."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse by the rule of the file readers."""
        from hetctl.inputs.quantities import parse_duration

        if isinstance(value, int):
            return value
        try:
            return parse_duration(value)
        except BadInputError as error:
            self.fail("; ".join(filter(None, (error.message, error.hint))), param, ctx)


class Seconds(click.ParamType):  # type: ignore[type-arg]
    """Option ``500``, ``2.5``, ``10m`` or ``30d``: seconds as a float.

    Parameters
    ----------
    least : float or None
        Smallest permitted value; None: anything above 0.
    """

    name = "seconds"

    def __init__(self, least: float | None = None) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse a number, or any other form of a time."""
        try:
            seconds = float(value)
        except ValueError:
            days = value.removesuffix("d")
            seconds = DAY_S * int(days) if days.isdecimal() else Duration().convert(value, param, ctx)
        if not math.isfinite(seconds) or seconds < (self.least or 0) or (self.least is None and not seconds):
            rule = "above 0" if self.least is None else f"at least {self.least:g}"
            self.fail(f"{value} is not a time of {rule} seconds", param, ctx)
        return seconds


class FiniteRange(click.FloatRange):
    """Option for a finite number in a range: comparisons would let NaN pass, and infinity without an end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a number in the range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class GpusByType(click.ParamType):  # type: ignore[type-arg]
    """Option ``80``, or ``v100:40,p100:40``: GPUs by type, "" if there is only one."""

    name = "gpus"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        """Parse by the rule of the file readers."""
        from hetctl.inputs.quantities import parse_gpus

        if isinstance(value, dict):
            return value
        try:
            return parse_gpus(value)
        except BadInputError as error:
            self.fail("; ".join(filter(None, (error.message, error.hint))), param, ctx)


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
