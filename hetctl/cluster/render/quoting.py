"""Template filters through which every value enters a script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from hetctl.model.errors import BadInputError


@dataclass(frozen=True)
class QuotingRule:
    """Where a value may stand: what it must match, how to say so, and how it is quoted there."""

    place: str
    pattern: re.Pattern[str]
    wanted: str
    quote: Callable[[str], str] = shlex.quote

    def __call__(self, value: object) -> str:
        """Return the quoted value.

        Raises
        ------
        BadInputError
            If the value cannot stand there.
        """
        text = str(value)
        if not self.pattern.fullmatch(text):
            raise BadInputError(
                f"{text!r} in {self.place}: it needs {self.wanted}",
                "Change it in the site file, or choose another name or folder.",
            )
        return self.quote(text)


PRINTABLE = r"[^\x00-\x1f\x7f]*"

# sbatch knows both kinds of quotes, but takes a backslash for an escape even within single ones (tried
# on 22.05). How bsub parses quotes is not documented, so its values must do without.
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
