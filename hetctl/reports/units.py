"""Formats of quantities: one function per unit."""

from __future__ import annotations

import re

NONE = "-"
CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
DEVICES = {"gpu": ("GPU", "GPUs"), "slot": ("slot", "slots")}


def format_seconds(seconds: float | None) -> str:
    """Return a time as ``4.2 s``, ``42 s``, ``1:23 min``, ``2:05 h`` or ``3 d 04 h``."""
    if seconds is None:
        return NONE
    # 9.95 and more would be rounded to 10.0, which is written without decimals.
    if 0 < seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60}:{minutes % 60:02d} h"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def format_ms(seconds: float) -> str:
    """Return a time in milliseconds with three digits and no unit, for a column that names it."""
    return f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:,.0f}"


GUESS = "~"
GUESS_NOTE = f"{GUESS} a guess: the rate was not measured"


def format_rate(rate: float | None, *, known: bool = True) -> str:
    """Return samples/s with at least three digits and no unit, for a column that names it."""
    if rate is None:
        return NONE
    decimals = 0 if rate >= 99.95 else 1 if rate >= 9.995 else 2
    return f"{'' if known else GUESS}{rate:,.{decimals}f}"


def format_bytes(size: int) -> str:
    """Return a memory size in binary units, ``1.5 GiB``."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1023.5 and len(units) > 1:
        value, units = value / 1024, units[1:]
    decimals = 0 if units[0] == "B" or value >= 99.95 else 1
    return f"{value:.{decimals}f} {units[0]}"


def format_metric(value: float | None) -> str:
    """Return a metric with four significant digits."""
    return NONE if value is None else f"{value:.4g}"


def format_percent(fraction: float | None) -> str:
    """Return a fraction as whole percent, ``93 %``."""
    return NONE if fraction is None else f"{fraction * 100:.0f} %"


def device_word(device: str, count: int = 2) -> str:
    """Return a site's word for its GPUs, ``slot`` or ``GPU``, in the number that fits `count`."""
    return DEVICES[device][count != 1]


def counted(count: int, word: str) -> str:
    """Return a number with a word in the number that fits, ``1 job`` or ``1,200 jobs``."""
    return f"{count:,} {word}{'s' * (count != 1)}"


def printable(text: str) -> str:
    """Remove characters that move a terminal's cursor or colour it; keep the end of a redrawn line."""
    # A progress bar redraws its line after a carriage return: only what is last drawn is shown.
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return CONTROL.sub("", "\n".join(lines)).expandtabs(4)
