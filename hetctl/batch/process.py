"""The one place that runs the commands of a batch system."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetctl.core.errors import BatchSystemError

TIMEOUT_S = 60


@dataclass(frozen=True)
class Answer:
    """What a command printed, and its exit code."""

    stdout: str
    stderr: str
    code: int


def run(argv: Sequence[str], stdin: Path | None = None) -> Answer:
    """Run a command once; it reads the file `stdin`, or nothing.

    Raises
    ------
    BatchSystemError
        If there is no such command, or it does not answer in a minute.
    """
    try:
        with Path(stdin or os.devnull).open("rb") as source:
            done = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, stdin=source
            )
    except (FileNotFoundError, PermissionError):
        raise BatchSystemError(
            f"{argv[0]} is not on the PATH of this machine",
            "log in to the site, or choose another with --site; `hetctl sites` lists them",
        ) from None
    except subprocess.TimeoutExpired:
        raise BatchSystemError(f"{argv[0]} did not answer in {TIMEOUT_S} s", "try again later") from None
    return Answer(done.stdout, done.stderr, done.returncode)


def order(argv: Sequence[str], stdin: Path | None = None) -> str:
    """Run a command that changes something, once; return what it printed.

    Raises
    ------
    BatchSystemError
        If it fails: the batch system's own words are in the message.
    """
    answer = run(argv, stdin)
    if answer.code != 0:
        raise BatchSystemError(f"{argv[0]} failed ({answer.code}): {_last_words(answer)}")
    return answer.stdout


def _last_words(answer: Answer) -> str:
    lines = (answer.stderr or answer.stdout).strip().splitlines()
    return " / ".join(lines[-3:]) or "it said nothing"
