"""Time-outs of site files: their values and errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from hetctl.inputs.durations import format_duration
from hetctl.inputs.site_schema import TimeoutsModel
from hetctl.inputs.yaml_source import Location
from hetctl.model.site import SIGN_EVERY_S, Timeouts

LEAST_SILENCE_S = 5 * SIGN_EVERY_S
"""Least value of `silence_s`: signs of life may be late, and some may be lost."""
WITHOUT_A_SIGN = ("meeting", "samples", "lockstep")
"""Time limits of waits during which ranks send no sign of life."""


def timeouts_of(model: TimeoutsModel) -> Timeouts:
    """Return the time-outs as a `Timeouts` value."""
    given = {f"{key}_s": float(value) for key, value in model if value is not None}
    return Timeouts(**given)


def timeouts_problems(timeouts: Timeouts) -> list[tuple[Location, str]]:
    """Return the time-outs that are too short for the operations that they have to cover."""
    return [(("timeouts", key), rule) for key, rule in _problems(timeouts)]


def _problems(timeouts: Timeouts) -> Iterator[tuple[str, str]]:
    values = {field.name.removesuffix("_s"): getattr(timeouts, field.name) for field in fields(timeouts)}
    shown = {key: format_duration(seconds) for key, seconds in values.items()}
    least, often = format_duration(LEAST_SILENCE_S), format_duration(SIGN_EVERY_S)
    for key in ("hang", "silence"):
        if values[key] < LEAST_SILENCE_S:
            yield key, f"must be at least {least}, since a sign of life comes every {often}, got {shown[key]}"
    for key in WITHOUT_A_SIGN:
        if values[key] > values["hang"]:
            yield key, f"must be at most hang, which is {shown['hang']}, got {shown[key]}"
