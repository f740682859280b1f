"""Execution of a batch system's commands, which no other module runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from hetctl.cluster.batch.base import JobRequest, SubmissionInDoubtError
from hetctl.model.errors import BatchSystemError
from hetctl.model.job import JobState, JobStatus
from hetctl.model.site import USUAL_TIMEOUTS
from hetctl.model.values import dataclass
from hetctl.storage.processes import die_with_parent

IGNORED = ("SQUEUE_", "SACCT_", "SBATCH_JOB_NAME", "SBATCH_ARRAY_INX")
"""Prefixes of the user's default options, removed since they could hide or rename jobs, or create arrays."""

INTERRUPTING = (signal.SIGINT, signal.SIGTERM)
"""Signals that wait while a command is started."""


@dataclass(frozen=True)
class Answer:
    """Output of a command, and its exit code."""

    stdout: str
    stderr: str
    code: int

    @property
    def error_tail(self) -> str:
        """Last part of its error output."""
        return " / ".join((self.stderr or self.stdout).strip().splitlines()[-3:]) or "no output"


class NoAnswerError(BatchSystemError):
    """Command that did not answer in time and was killed."""


@dataclass(frozen=True)
class CommandRunner:
    """Runner of a batch system's commands.

    Parameters
    ----------
    timeout_s : float
        Time limit of each command in seconds.
    patience_s : float
        Seconds for which a query is repeated that fails for a temporary reason.
    pauses_s : tuple of float
        Pauses in seconds before the repetitions of a query.
    """

    timeout_s: float = USUAL_TIMEOUTS.command_s
    patience_s: float = 60.0
    pauses_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 15.0)

    def run(self, argv: Sequence[str], stdin: Path | None = None) -> Answer:
        """Run a command once, with the file `stdin` or an empty input.

        Raises
        ------
        BatchSystemError
            If the command or file does not exist; a `NoAnswerError` if it does not answer in time.
        """
        with _opened(stdin) as source:
            try:
                with _started(argv, source) as process:
                    stdout, stderr = process.communicate(timeout=self.timeout_s)
            except (FileNotFoundError, PermissionError):
                raise BatchSystemError(
                    f"{argv[0]} is not on the PATH of this machine",
                    "log in to the site, or choose another with --site; `hetctl sites` lists them",
                ) from None
            except subprocess.TimeoutExpired:
                raise NoAnswerError(
                    f"{argv[0]} did not answer in {self.timeout_s:g} s",
                    "try again later, or raise `timeouts: command` in the site file",
                ) from None
        return Answer(stdout, stderr, process.returncode)

    def run_with_retry(self, argv: Sequence[str], transient: Collection[str]) -> Answer:
        """Run a repeatable command again with growing pauses while it fails for a temporary reason.

        Parameters
        ----------
        transient : collection of str
            Parts of the error messages of temporary failures.

        Raises
        ------
        BatchSystemError
            Same as in `run`. A command that still fails at the end returns its answer.
        """
        limit = time.monotonic() + self.patience_s
        for pause in self.pauses_s:
            try:
                answer = self.run(argv)
            except NoAnswerError:
                if time.monotonic() + pause > limit:
                    raise
            else:
                is_transient = answer.code != 0 and matches(answer, transient)
                if not is_transient or time.monotonic() + pause > limit:
                    return answer
            time.sleep(pause)
        return self.run(argv)

    def check_output(
        self, argv: Sequence[str], transient: Collection[str] = (), harmless: Collection[str] = ()
    ) -> str:
        """Run a repeatable command as `run_with_retry` does; return its output.

        Parameters
        ----------
        harmless : collection of str
            Parts of error messages despite which the output of a failed command is valid.

        Raises
        ------
        BatchSystemError
            If the command fails; the message contains that of the batch system.
        """
        answer = self.run_with_retry(argv, transient)
        if answer.code != 0 and not matches(answer, harmless):
            hint = "try again when the batch system is back" if matches(answer, transient) else ""
            raise BatchSystemError(f"{argv[0]} failed ({answer.code}): {answer.error_tail}", hint)
        return answer.stdout

    def run_best_effort(self, argv: Sequence[str]) -> str:
        """Run an optional command once; return its output, which is empty if the command cannot be run."""
        try:
            return self.run(argv).stdout
        except BatchSystemError:
            return ""

    def submit(self, argv: Sequence[str], stdin: Path | None, refusals: Collection[str]) -> str:
        """Run a command that submits a job, once; return its output.

        The command is killed when this process ends, so that no job is submitted without a record.

        Parameters
        ----------
        refusals : collection of str
            Parts of the error messages after which no job exists.

        Raises
        ------
        BatchSystemError
            If the batch system refuses; a `SubmissionInDoubtError` after any other failure.
        """
        try:
            answer = self.run(argv, stdin)
        except NoAnswerError as error:
            raise SubmissionInDoubtError(error.message, DOUBT) from None
        if answer.code == 0:
            return answer.stdout
        message = f"{argv[0]} failed ({answer.code}): {answer.error_tail}"
        # A command that was killed, or whose answer was lost, may have sent its request.
        if answer.code > 0 and matches(answer, refusals):
            raise BatchSystemError(message, REFUSED)
        raise SubmissionInDoubtError(message, DOUBT)


USUAL_COMMANDS = CommandRunner()
REFUSED = (
    "`hetctl doctor` compares the site file with the machine: correct the file,"
    " or the options --gpus, --time, --queue and --account"
)
DOUBT = "the next hetctl command looks whether the job is there, and submits it if it is not"


class CommandBatch:
    """Batch system that is used through its commands; a kind names them, and reads their output.

    `refusals`, `transient` and `over` have parts of messages: of refused submissions, after which no job
    exists; of temporary failures; of lines about jobs that have ended. `submitted` finds the id of a job in
    the output of the submit command, `id_prefix` is put before it.
    """

    refusals: Collection[str]
    transient: Collection[str]
    over: Collection[str]
    cancel_command: tuple[str, ...]
    submitted: re.Pattern[str]
    id_prefix = ""

    def __init__(self, _folder: Path, commands: CommandRunner = USUAL_COMMANDS) -> None:
        self._commands = commands

    def submit(self, request: JobRequest) -> str:
        """Submit a script that has all options of its job; return the id in the output."""
        if not request.script.is_file():  # bsub would take its name for a command
            raise BatchSystemError(f"cannot read {request.script}: no such file")
        if request.submitit:
            # Else its import configures logging, which closes the handlers of the program around.
            os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")
            # Imported on use: submitit takes 0.11 s.
            from hetctl.cluster.batch.submitit_executor import submit_by_submitit

            return submit_by_submitit(request, request.submitit, self.refusals, self.parse_job_id)
        return self.parse_job_id(self._commands.submit(request.command, request.stdin, self.refusals))

    def parse_job_id(self, text: str) -> str:
        """Return the id in the output of the submit command; SubmissionInDoubtError if it has none."""
        found = self.submitted.findall(text)
        if not found:
            raise SubmissionInDoubtError(f"the submit command printed no job id: {text.strip()!r}", DOUBT)
        return f"{self.id_prefix}{found[-1]}"

    def statuses(self, ids: Sequence[str]) -> Mapping[str, JobStatus]:
        """Return the states of jobs; those that the batch system does not know, or no longer, are UNKNOWN."""
        found = self._statuses(ids) if ids else {}
        return {job: found.get(job, JobStatus(JobState.UNKNOWN)) for job in ids}

    def find(self, names: Sequence[str], *, recorded: bool = True) -> Mapping[str, str]:
        """Return the ids of this user's jobs with these names."""
        found = self._find(names, recorded) if names else {}
        return {name: job for name, job in found.items() if job and name in names}

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel jobs by a command that fails if one of them has ended, although it ends the others."""
        if not ids:
            return
        answer = self._commands.run_with_retry([*self.cancel_command, *ids], self.transient)
        lines = filter(str.strip, f"{answer.stdout}\n{answer.stderr}".splitlines())
        if answer.code != 0 and not all(any(part in line for part in self.over) for line in lines):
            command = " ".join(self.cancel_command)
            raise BatchSystemError(f"{command} failed ({answer.code}): {answer.error_tail}")

    def _ask(self, command: Sequence[str], harmless: Collection[str] = ()) -> str:
        return self._commands.check_output(command, self.transient, harmless)

    def _statuses(self, ids: Sequence[str]) -> Mapping[str, JobStatus]:
        raise NotImplementedError

    def _find(self, names: Sequence[str], recorded: bool) -> Mapping[str, str | None]:
        raise NotImplementedError


def matches(answer: Answer, parts: Collection[str]) -> bool:
    """Return true if the output of a command contains any of these parts."""
    return any(part in answer.stderr or part in answer.stdout for part in parts)


def newest(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the ids by name, of pairs of a name and an id: the newest if there are several."""
    found: dict[str, str] = {}
    for name, job in named:
        if name:
            found[name] = max(job, found.get(name, job), key=int)
    return found


def sections(headings: re.Pattern[str], text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each heading in a text, and what follows it up to the next one."""
    heads = list(headings.finditer(text))
    ends = [*(head.start() for head in heads), len(text)][1:]
    yield from ((head, text[head.end() : end]) for head, end in zip(heads, ends, strict=True))


@contextmanager
def _started(argv: Sequence[str], source: BinaryIO) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and kill it at the end if it still runs."""
    with ExitStack() as stack:
        # Python ignores what handlers raise in callbacks after a fork: signals wait until the command runs.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTING)
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        process = subprocess.Popen(
            argv,
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # SQUEUE_FORMAT, for one, would change the output that is parsed here.
            env={k: v for k, v in os.environ.items() if not k.startswith(IGNORED)},
            preexec_fn=_prepared(mask),
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield process


def _prepared(mask: Collection[int]) -> Callable[[], None]:
    """Return what a command does before exec."""
    # A submission that outlives this process could succeed after the next command has looked for the job.
    request_signal = die_with_parent(signal.SIGKILL)

    def prepare() -> None:
        request_signal()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def _opened(path: Path | None) -> BinaryIO:
    try:
        return Path(path or os.devnull).open("rb")
    except OSError as error:
        raise BatchSystemError(f"cannot read {path}: {error}") from None
