"""Template filters that check and quote every value in a script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from hetctl.model.errors import BadInputError


@dataclass(frozen=True)
class QuotingRule:
    """Rule for a place in a script: pattern of valid values, its description, and the quoting function."""

    place: str
    pattern: re.Pattern[str]
    wanted: str
    quote: Callable[[str], str] = shlex.quote

    def __call__(self, value: object) -> str:
        """Return the quoted value.

        Raises
        ------
        BadInputError
            If the value is not valid in this place.
        """
        text = str(value)
        if not self.pattern.fullmatch(text):
            raise BadInputError(
                f"{text!r} in {self.place} must have {self.wanted}",
                "change it in the site file, or choose another name or folder",
            )
        return self.quote(text)


PRINTABLE = r"[^\x00-\x1f\x7f]*"

# sbatch accepts both kinds of quotes, but treats a backslash as an escape even within single quotes (tested
# with 22.05). bsub's parsing of quotes is undocumented, so its values must not contain any.
FILTERS: dict[str, Callable[[object], str]] = {
    "shell": QuotingRule("the script", re.compile(PRINTABLE), "no control characters"),
    "variable": QuotingRule(
        "the environment", re.compile(r"[A-Za-z_][A-Za-z0-9_]*"), "the form of a variable's name"
    ),
    "line": QuotingRule("a directive", re.compile(PRINTABLE), "no control characters", str),
    "sbatch": QuotingRule(
        "a line #SBATCH", re.compile(r"[^\x00-\x1f\x7f\\]+"), "neither backslashes nor control characters"
    ),
    "bsub": QuotingRule(
        "a line #BSUB",
        re.compile(r"[\w./:,+=@][\w./:,+=@-]*", re.ASCII),
        "letters, digits and ._/:,+=@- only",
    ),
}
