"""Hyper-parameters of a search and their possible values."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from hetctl.model.errors import BadInputError

Value = bool | int | float | str | None


@dataclass(frozen=True)
class Categorical:
    """A choice among values, all equally likely."""

    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise BadInputError("a choice has no values, but must have at least one")

    def at(self, share: float) -> Value:
        """Return the value at a position in [0, 1)."""
        return self.values[int(share * len(self.values))]

    @property
    def is_number(self) -> bool:
        """True if all values are numbers."""
        return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in self.values)


@dataclass(frozen=True)
class NumberRange:
    """A range of numbers from `low` to `high`, both included.

    Parameters
    ----------
    log : bool
        True if all orders of magnitude are equally likely, rather than all numbers.
    whole : bool
        True for integers only.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        rules = (
            (math.isfinite(self.low) and math.isfinite(self.high), "both ends must be finite"),
            (self.low <= self.high, "the first must not be larger than the second"),
            (self.low > 0 or not self.log, "a logarithmic one must begin above 0"),
            (not self.whole or self._ends_are_whole, "a whole one must end in whole numbers"),
        )
        for holds, rule in rules:
            if not holds:
                raise BadInputError(f"a range goes from {self.low} to {self.high}, but {rule}")

    @property
    def is_number(self) -> bool:
        """True, for any range."""
        return True

    def at(self, share: float) -> Value:
        """Return the value at a position in [0, 1)."""
        # Rounded down below, so that the upper end is as likely as all others.
        high = self.high + 1 if self.whole else self.high
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(high) - math.log(self.low)))
        else:
            value = self.low + share * (high - self.low)
        if self.whole:
            value = math.floor(value)
        # exp() of a logarithm may leave the range by rounding.
        return min(max(value, self.low), self.high)

    @property
    def _ends_are_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


Parameter = Categorical | NumberRange
Space = Mapping[str, Parameter]


def draws(seed: int, number: int) -> random.Random:
    """Return the random generator of one trial, which depends only on the seed and the trial's number."""
    # Seeded by text, which Python hashes with SHA-512: the same in every process.
    return random.Random(f"{seed}/{number}")
