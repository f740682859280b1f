"""Marks of fields that are keys of files which users write: their meaning, and the values they may have."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

DURATION, SIZE = "duration", "size"
"""Forms of numbers in files: times such as 2h for seconds, and memory such as 512GB for bytes."""


class Limits:
    """Limits of a value within `Annotated`, as arguments of `pydantic.Field`, and its form in files.

    Parameters
    ----------
    form : str
        `DURATION`, `SIZE`, or empty if the file has the value itself.
    """

    def __init__(self, form: str = "", **limits: Any) -> None:
        self.form, self.limits = form, limits


Bytes = Annotated[int, Limits(SIZE)]


class Key(Limits):
    """Mark of a field that is a key of a file, within `Annotated`; for a `DURATION`, without its ``_s``.

    Parameters
    ----------
    description : str
        Its meaning, for the JSON Schema.
    null : str
        What null stands for, which is the default in files, where the value itself is never None.
    choices : tuple of str or int
        Values that it may have; empty: any.
    """

    def __init__(
        self,
        description: str,
        form: str = "",
        null: str = "",
        choices: tuple[str | int, ...] = (),
        **limits: Any,
    ) -> None:
        super().__init__(form, **limits)
        self.description, self.null, self.choices = description, null, choices


class Pattern(NamedTuple):
    """Constraint that a whole text matches `pattern`; `rule` states it in words."""

    pattern: str
    rule: str
