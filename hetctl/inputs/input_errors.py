"""Errors of input files: one exception that names every file, line and rule."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hetctl.model.errors import BadInputError

MOST_SHOWN = 20


class SourceLine(NamedTuple):
    """Line of a file, counted from 1."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def refusal(problems: Iterable[tuple[SourceLine, str]]) -> BadInputError:
    """Return one exception for all problems, sorted by place; those beyond 20 are only counted."""
    lines = [f"{place}: {rule}" for place, rule in sorted(set(problems))]
    if len(lines) > MOST_SHOWN:
        lines[MOST_SHOWN:] = [f"and {len(lines) - MOST_SHOWN} more"]
    return BadInputError("\n".join(lines))


def refuse(problems: Iterable[tuple[SourceLine, str]]) -> None:
    """Raise `refusal` if there are problems."""
    if found := list(problems):
        raise refusal(found)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the most similar known word, or all known words."""
    words = sorted(set(known))
    close = difflib.get_close_matches(word, words, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(words)}" if words else ""


def shown(value: Any) -> str:
    """Return the text of a value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_text(path: Path) -> str:
    """Read a whole UTF-8 file, with or without a byte order mark.

    Raises
    ------
    BadInputError
        If the file cannot be read or is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from None
    # A path with a null byte raises ValueError instead of OSError.
    except ValueError as error:
        raise BadInputError(f"{shown(str(path))}: cannot be read: {error}") from None
    try:
        # Excel writes a byte order mark, which would otherwise become part of the first column's name.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise refusal([(SourceLine(path, line), f"byte 0x{data[error.start]:02x} is not UTF-8")]) from None
