"""Checks shared by the settings of several methods."""

from __future__ import annotations

from hetctl.model.errors import BadInputError


def at_least(least: int, **settings: int) -> None:
    """Raise BadInputError for the first setting below `least`."""
    for name, value in settings.items():
        if value < least:
            raise BadInputError(f"{name} is {value}, but must be at least {least}")
