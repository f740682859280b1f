"""Durations, sizes and numbers of GPUs in user-written form."""

from __future__ import annotations

import re

from hetctl.inputs.input_errors import shown
from hetctl.model.errors import BadInputError
from hetctl.model.training_settings import EPOCHS, SECONDS, STEPS, CheckpointInterval

WITH_UNITS = re.compile(r"(?:([0-9]{1,7})h)?(?:([0-9]{1,7})m)?(?:([0-9]{1,9})s)?", re.IGNORECASE)
CLOCK = re.compile(r"([0-9]{1,7}):([0-5][0-9])(?::([0-5][0-9]))?")
SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGTP]i?B|B)", re.IGNORECASE)
COUNT = re.compile(r"[0-9]{1,30}")
INTERVAL = re.compile(r"([0-9]{1,9}) ?(epoch|step)s?")
COUNT_OF_TYPE = re.compile(r"([^\s:,][^:,]*):\s*([0-9]{1,30})")
MOST_GPUS = 1_000_000
UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)},
}


def parse_duration(text: str) -> int:
    """Return the seconds in ``2h``, ``90m``, ``45s``, ``1h30m``, ``2:00:00`` or ``0:30`` (h:mm).

    Raises
    ------
    BadInputError
        If the text has another form, lacks its unit or is not above zero.
    """
    text = text.strip()
    match = CLOCK.fullmatch(text) or WITH_UNITS.fullmatch(text)
    if match is None or not any(match.groups()):
        hint = f"write {text}s, {text}m or {text}h" if text.isdecimal() else ""
        raise BadInputError(f"{shown(text)} is not a duration such as 2h, 90m, 1h30m or 2:00:00", hint)
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total = hours * 3600 + minutes * 60 + seconds
    if total == 0:
        raise BadInputError(f"duration {shown(text)} must be longer than 0 s")
    return total


def format_duration(seconds: float) -> str:
    """Write seconds as ``1h30m``, ``2m05s`` or, below ten seconds, ``3.2s``."""
    whole = round(seconds)
    if abs(seconds) < 10 and whole != seconds:
        return f"{seconds:.1f}s"
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h" + (f"{minutes:02d}m" if minutes or rest else "") + (f"{rest:02d}s" if rest else "")
    if minutes:
        return f"{minutes}m" + (f"{rest:02d}s" if rest else "")
    return f"{rest}s"


def parse_interval(text: str) -> CheckpointInterval:
    """Return the interval ``10m``, ``500 steps`` or ``2 epochs``.

    Raises
    ------
    BadInputError
        If the text has another form, lacks its unit or is not above zero.
    """
    text = text.strip()
    timed, counted = WITH_UNITS.fullmatch(text), INTERVAL.fullmatch(text)
    if timed and any(timed.groups()):
        return CheckpointInterval(parse_duration(text), SECONDS)
    if counted is None:
        raise BadInputError(
            f"{shown(text)} is not an interval such as 10m, 500 steps or 2 epochs", "write it with its unit"
        )
    if int(counted[1]) == 0:
        raise BadInputError(f"interval {shown(text)} must be longer than 0")
    return CheckpointInterval(int(counted[1]), {"epoch": EPOCHS, "step": STEPS}[counted[2]])


def parse_bytes(text: str | int) -> int:
    """Return the bytes in ``512GB`` (1000s), ``512GiB`` (1024s) or a plain whole number.

    Raises
    ------
    BadInputError
        If the text has another form, lacks its unit or is not above zero.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    size = round(float(match[1]) * UNITS[match[2].lower()]) if match else 0
    if size <= 0:
        raise BadInputError(f"{shown(text)} is not a size such as 512GB, 480GiB or bytes above 0")
    return size


def parse_gpus(text: str) -> dict[str, int]:
    """Return the number of GPUs by type for ``v100:40,p100:40``, or under the type "" for ``80``.

    Raises
    ------
    BadInputError
        If the text has another form, names a type twice, or gives no GPUs.
    """
    if COUNT.fullmatch(text.strip()):
        return {"": _count_of_gpus(text, text)}
    found: dict[str, int] = {}
    for part in text.split(","):
        match = COUNT_OF_TYPE.fullmatch(part.strip())
        if match is None:
            raise BadInputError(
                f"{shown(part.strip())} in GPUs {shown(text)} is not a type and a number",
                "write a number such as 80, or types such as v100:40,p100:40",
            )
        gpu_type = match[1].strip()
        if gpu_type in found:
            raise BadInputError(f"GPUs {shown(text)} name type {shown(gpu_type)} twice")
        found[gpu_type] = _count_of_gpus(match[2], text)
    return found


def _count_of_gpus(digits: str, text: str) -> int:
    count = int(digits)
    if not 1 <= count <= MOST_GPUS:
        raise BadInputError(f"GPUs {shown(text)} must be at least 1 of each type, and at most {MOST_GPUS}")
    return count
