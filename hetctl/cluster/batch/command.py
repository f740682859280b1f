"""The one place that runs the commands of a batch system."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hetctl.cluster.batch.base import SubmissionInDoubtError
from hetctl.model.errors import BatchSystemError
from hetctl.storage.processes import die_with_parent

TIMEOUT_S = 60.0
ASK_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Pauses before a question is asked again."""
PATIENCE_S = 60.0
"""No question is asked again after this time."""
IGNORED = ("SQUEUE_", "SACCT_", "SBATCH_JOB_NAME", "SBATCH_ARRAY_INX")
"""The user's own defaults: they would hide jobs, rename them or make many of one."""


@dataclass(frozen=True)
class Answer:
    """What a command printed, and its exit code."""

    stdout: str
    stderr: str
    code: int

    @property
    def last_words(self) -> str:
        """The end of what it complained of."""
        lines = (self.stderr or self.stdout).strip().splitlines()
        return " / ".join(lines[-3:]) or "it said nothing"


class NoAnswerError(BatchSystemError):
    """A command did not answer in time, and was killed."""


def run(argv: Sequence[str], stdin: Path | None = None) -> Answer:
    """Run a command once; it reads the file `stdin`, or nothing.

    Raises
    ------
    BatchSystemError
        If there is no such command or file; a `NoAnswerError` if it does not answer in a minute.
    """
    with _opened(stdin) as source:
        try:
            done = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                stdin=source,
                env={k: v for k, v in os.environ.items() if not k.startswith(IGNORED)},
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        except (FileNotFoundError, PermissionError):
            raise BatchSystemError(
                f"{argv[0]} is not on the PATH of this machine",
                "log in to the site, or choose another with --site; `hetctl sites` lists them",
            ) from None
        except subprocess.TimeoutExpired:
            raise NoAnswerError(f"{argv[0]} did not answer in {TIMEOUT_S:g} s", "try again later") from None
    return Answer(done.stdout, done.stderr, done.returncode)


def _opened(path: Path | None) -> BinaryIO:
    try:
        return Path(path or os.devnull).open("rb")
    except OSError as error:
        raise BatchSystemError(f"cannot read {path}: {error}") from None


def run_with_retry(argv: Sequence[str], passing: Collection[str]) -> Answer:
    """Run a command that may be repeated, again and again with growing pauses while it is of use.

    Parameters
    ----------
    passing : collection of str
        What a failing command says of troubles that pass, in parts.

    Raises
    ------
    BatchSystemError
        As `run` does. A command that fails at last is an answer.
    """
    limit = time.monotonic() + PATIENCE_S
    for pause in ASK_AGAIN_S:
        try:
            answer = run(argv)
        except NoAnswerError:
            if time.monotonic() + pause > limit:
                raise
        else:
            hopeful = answer.code != 0 and matches(answer, passing)
            if not hopeful or time.monotonic() + pause > limit:
                return answer
        time.sleep(pause)
    return run(argv)


def check_output(argv: Sequence[str], passing: Collection[str] = (), harmless: Collection[str] = ()) -> str:
    """Run a command that may be repeated, as `run_with_retry` does; return what it printed.

    Parameters
    ----------
    harmless : collection of str
        What the command says, in parts, where it has failed and its answer holds all the same.

    Raises
    ------
    BatchSystemError
        If it fails: the batch system's own words are in the message.
    """
    answer = run_with_retry(argv, passing)
    if answer.code != 0 and not matches(answer, harmless):
        hint = "try again when the batch system is back" if matches(answer, passing) else ""
        raise BatchSystemError(f"{argv[0]} failed ({answer.code}): {answer.last_words}", hint)
    return answer.stdout


def run_best_effort(argv: Sequence[str]) -> str:
    """Run, once, a command that can be done without; return what it printed, nothing if it cannot be run."""
    try:
        return run(argv).stdout
    except BatchSystemError:
        return ""


def submit(argv: Sequence[str], stdin: Path | None, doubtful: Collection[str]) -> str:
    """Run a command that submits a job, once; return what it printed.

    It dies with this process: nothing is submitted for somebody who is no longer there to know of it.

    Parameters
    ----------
    doubtful : collection of str
        What the command says, in parts, where it failed and the job may have been taken all the same.

    Raises
    ------
    BatchSystemError
        If the batch system refuses; a `SubmissionInDoubtError` if nobody knows whether it did.
    """
    try:
        answer = run(argv, stdin)
    except NoAnswerError as error:
        raise SubmissionInDoubtError(error.message, DOUBT) from None
    if answer.code == 0:
        return answer.stdout
    message = f"{argv[0]} failed ({answer.code}): {answer.last_words}"
    if answer.code < 0 or matches(answer, doubtful):
        raise SubmissionInDoubtError(message, DOUBT)
    raise BatchSystemError(message)


DOUBT = "the next hetctl command looks whether the job is there, and submits it if it is not"


def matches(answer: Answer, parts: Collection[str]) -> bool:
    """Whether a command complained in any of these words."""
    return any(part in answer.stderr or part in answer.stdout for part in parts)
