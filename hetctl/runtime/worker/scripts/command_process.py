"""The process of a member's command on one rank: its start, its reports, and its end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetctl.model.errors import TransientInputError
from hetctl.model.training_settings import ANSWER_VARIABLE, PROGRESS_VARIABLE, STOP_VARIABLE
from hetctl.model.values import dataclass
from hetctl.runtime.worker.messages import COMMAND_SIGNALS
from hetctl.runtime.worker.scripts.warm_start import WarmStart
from hetctl.storage.processes import commands_below, die_with_parent, group_cpu_seconds

KEPT_BYTES = 4096
"""Bytes at the end of the standard error that are kept for the cause of a failure."""
PIPE_BYTES = 2**16
"""Bytes that a pipe holds, as in pipe(7)."""
CLOSED_POLL_S = 0.05
"""Longest wait in seconds once the pipe for reports is closed."""
GUARD = 'trap "" HUP INT TERM USR1; while read next; do group=$next; done; kill -9 "-$group"'
"""Shell program that kills the last process group that it was told of when its standard input is closed."""

MAX_LINE_BYTES = 2**16
"""Bytes after which a line without an end counts as a line."""
SHOWN = 80
"""Characters of a wrong line that are shown."""


class CommandProcess:
    """Command of a rank, in a process group of its own that ends with the rank.

    Parameters
    ----------
    folder : Path
        Folder in which it runs.
    grace_s : float
        Grace period in seconds; the signals of a stop follow at shares of it.
    warm : callable or None
        Function that has it started by a warm Python, from its descriptors for standard error and, by
        variable, for pipes; None: it is started as a new program.

    Raises
    ------
    TransientInputError
        If it cannot be started.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        grace_s: float,
        warm: Callable[[int, Mapping[str, int]], WarmStart] | None = None,
    ) -> None:
        self.environment, self.program = environment, words[0]
        self._grace_s = grace_s
        self._reports, progress = os.pipe()
        answers, self._answers = os.pipe()
        stop, self._stop = os.pipe()
        errors, errors_end = os.pipe()
        end_with_rank = die_with_parent(signal.SIGKILL)

        def prepare() -> None:
            end_with_rank()
            # The signal must not end a command that has no handler for it.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

        theirs = {PROGRESS_VARIABLE: progress, ANSWER_VARIABLE: answers, STOP_VARIABLE: stop}
        self._process: _NewProgram | WarmStart
        try:
            if warm:
                self._process = warm(errors_end, theirs)
            else:
                self._process = _NewProgram(
                    words,
                    cwd=folder,
                    env={**environment, **{name: str(end) for name, end in theirs.items()}},
                    stdin=subprocess.DEVNULL,
                    stderr=errors_end,
                    pass_fds=tuple(theirs.values()),
                    start_new_session=True,
                    preexec_fn=prepare,
                )
        except OSError as error:
            for descriptor in (self._reports, self._answers, self._stop, errors):
                os.close(descriptor)
            raise TransientInputError(
                f"the program '{words[0]}' of the command cannot be started: {error.strerror}",
                "correct `command` in the ensemble file, or the PATH of the job:"
                f" {environment.get('PATH', '')}",
            ) from None
        finally:
            for descriptor in (*theirs.values(), errors_end):
                os.close(descriptor)
        # A command that reads no answers must not keep the rank waiting.
        os.set_blocking(self._answers, False)
        # It ends the group when this process ends: the kernel would end the child alone.
        self._guarded = False
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._errors = _ErrorTail(errors)
        self._rest = b""
        self._open = True
        self._stopped_at: float | None = None
        self._to_send = list(COMMAND_SIGNALS)
        self.leader()

    @property
    def stopping(self) -> bool:
        """True if it was told to stop."""
        return self._stopped_at is not None

    @property
    def began_at(self) -> float:
        """Time of its start, in seconds since the epoch."""
        self.leader()
        return self._process.began_at

    def leader(self) -> int | None:
        """Return the number of its process and group; None until a warm Python has forked."""
        if not self._guarded:
            self._process.ended()
        if not self._guarded and self._process.pid:
            self._guarded = True
            assert self._guard.stdin
            with suppress(BrokenPipeError):
                self._guard.stdin.write(b"%d\n" % self._process.pid)
        return self._process.pid

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its processes in seconds."""
        return group_cpu_seconds(leader) if (leader := self.leader()) else 0.0

    def pids(self) -> set[int]:
        """Return the numbers of all its processes."""
        rank, leader = os.getpid(), self.leader()
        return commands_below([rank], {rank: leader} if leader else {})[rank]

    def reports(self, wait_s: float) -> Iterator[bytes]:
        """Yield the lines that it writes to its descriptor for reports within `wait_s` seconds."""
        if not self._open:
            # Mostly its exit has closed the pipe, and shows soon.
            time.sleep(min(wait_s, CLOSED_POLL_S))
            return
        # Twice, to see its end, and no more: a command that writes on and on must not keep the rank here.
        for patience_s in (wait_s, 0.0):
            if self._open and select.select([self._reports], [], [], patience_s)[0]:
                data = os.read(self._reports, PIPE_BYTES)
                self._open = bool(data)
                # The end of the last line may be missing.
                lines, self._rest = whole_lines(self._rest + (data or b"\n"))
                yield from lines

    def answer(self, lines: int) -> None:
        """Tell it that so many of its report lines are judged."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._answers, b"." * lines)

    def stop(self) -> None:
        """Tell it to write a checkpoint and exit; `escalate` follows this up."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            os.close(self._stop)
            # Not to its group: processes that it has forked inherit its handler.
            if leader := self.leader():
                with suppress(ProcessLookupError):
                    os.kill(leader, signal.SIGUSR1)

    def escalate(self) -> None:
        """Send SIGTERM, later SIGKILL, to its group if it was told to stop long enough ago."""
        if self._stopped_at is None:
            return
        since = time.monotonic() - self._stopped_at
        while self._to_send and since > self._to_send[0][0] * self._grace_s:
            _, number = self._to_send.pop(0)
            print(f"the command was told to stop {since:.1f} s ago: {number.name}", flush=True)
            self._signal(number)

    def ended(self) -> int | None:
        """Return its exit code, -n if signal n ended it; None if it runs.

        It stays a zombie until `close`, which keeps its number, also its group's, from other processes.
        """
        self.leader()
        return self._process.ended()

    def close(self) -> None:
        """End the processes of its group that still run."""
        self._signal(signal.SIGKILL)
        assert self._guard.stdin
        self._guard.stdin.close()
        self._guard.wait()
        self._process.wait()
        self._errors.join()
        os.close(self._reports)
        os.close(self._answers)
        if not self.stopping:
            os.close(self._stop)

    def last_errors(self) -> str:
        """Return the last part of its standard error once it has ended; empty if it wrote none."""
        self._signal(signal.SIGKILL)
        self._errors.join()
        return self._errors.kept.decode(errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        if leader := self.leader():
            with suppress(ProcessLookupError):
                os.killpg(leader, number)
        elif isinstance(self._process, WarmStart) and number in (signal.SIGTERM, signal.SIGKILL):
            self._process.give_up(number)


class _NewProgram(subprocess.Popen[bytes]):
    """Command as a program of its own."""

    def __init__(self, *words: Any, **options: Any) -> None:
        self.began_at = time.time()
        super().__init__(*words, **options)

    def ended(self) -> int | None:
        """Return its exit code, -n if signal n ended it; None if it runs. It stays a zombie until `wait`."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


class _ErrorTail:
    """Thread that copies standard error into the log, and keeps its last part."""

    def __init__(self, source: int) -> None:
        self._source, self._log = source, os.dup(2)
        self.kept = b""
        self._thread = threading.Thread(target=self._copy, name="errors", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while data := os.read(self._source, 2**16):
            self.kept = (self.kept + data)[-KEPT_BYTES:]
            # A full disk must not block the command.
            with suppress(OSError):
                os.write(self._log, data)
        os.close(self._source)
        os.close(self._log)

    def join(self) -> None:
        """Wait for the end of standard error; a process that has left the group may hold it open."""
        self._thread.join(timeout=1.0)


@dataclass(frozen=True)
class ScriptReport:
    """Report from `hetctl.script.report`.

    Parameters
    ----------
    epoch : int or None
        Number of the epoch, from 1; None for a checkpoint alone.
    samples, seconds : float or None
        Samples and seconds of the epoch, or of its finished part.
    finished : bool
        False for progress within the epoch.
    checkpoint, predictions : str or None
        Path of a complete checkpoint, and of a file with the predictions of a finished epoch.
    """

    epoch: int | None
    metrics: Mapping[str, float]
    samples: float | None = None
    seconds: float | None = None
    finished: bool = True
    checkpoint: str | None = None
    predictions: str | None = None


class WrongReportError(ValueError):
    """Line that is no report, with the rule that it breaks."""


def parse_report(line: bytes) -> ScriptReport:
    """Return the report in a line.

    Raises
    ------
    WrongReportError
        If the line is no report.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise WrongReportError("it is not JSON") from None
    if not isinstance(value, dict):
        raise WrongReportError("it is not a JSON object")
    checkpoint, predictions = (_path(value, key) for key in ("checkpoint", "predictions"))
    finished = value.pop("finished", True)
    if not isinstance(finished, bool):
        raise WrongReportError("finished must be true or false")
    epoch = value.pop("epoch", None)
    only_checkpoint = checkpoint is not None and epoch is None and not value
    if not only_checkpoint and (type(epoch) is not int or epoch < 1):
        raise WrongReportError("epoch must be a whole number, from 1")
    if predictions is not None and not (finished and epoch):
        raise WrongReportError("predictions are those of a finished epoch")
    samples, seconds = (_positive(value, key) for key in ("samples", "seconds"))
    for name, metric in value.items():
        if not _is_number(metric):
            raise WrongReportError(f"{name} must be a number")
    metrics = {name: float(metric) for name, metric in value.items()}
    return ScriptReport(epoch, metrics, samples, seconds, finished, checkpoint, predictions)


def printable(line: bytes) -> str:
    """Return the beginning of a line for messages, without a terminal's control characters."""
    text = line.decode(errors="replace")
    return "".join(char if char.isprintable() else "?" for char in text[:SHOWN])


def whole_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete lines and the rest; a rest that is too long counts as a line."""
    *whole, rest = data.split(b"\n")
    if len(rest) > MAX_LINE_BYTES:
        whole, rest = [*whole, rest], b""
    return [line for line in whole if line.strip()], rest


def _path(value: dict[str, Any], key: str) -> str | None:
    path = value.pop(key, None)
    if path is not None and not (isinstance(path, str) and path):
        raise WrongReportError(f"{key} must be a path")
    return path


def _positive(value: dict[str, Any], key: str) -> float | None:
    number = value.pop(key, None)
    if number is not None and not (_is_number(number) and 0 < number < float("inf")):
        raise WrongReportError(f"{key} must be a number above 0")
    return None if number is None else float(number)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
