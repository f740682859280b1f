"""Logs of a run: which there are, the part of a member's log that belongs to a task, and what is appended."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hetctl.app.project import Project
from hetctl.app.run.select_run import named_run
from hetctl.model.errors import BadInputError
from hetctl.model.events import DRIVER
from hetctl.model.job import UNDER_WAY
from hetctl.model.run_results import LogFile, RunLogs
from hetctl.model.values import dataclass
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_files import read_spec

CHUNK = 2**16
TAIL_LINES, TAIL_BYTES = 5, 64_000
"""Last lines of a log that are shown with a failure, and the bytes in which they are searched."""
STARTED = b'{"kind": "task_started"'
"""Beginning of the line of a task's start in the drivers' file."""


@dataclass(frozen=True)
class LogPart:
    """Part of a log.

    Parameters
    ----------
    round : int or None
        Round of the task that wrote it; None: it is of no single task.
    start : int
        First byte.
    end : int or None
        Byte after the last; None: the end of the file.
    """

    run: str
    path: Path
    round: int | None = None
    start: int = 0
    end: int | None = None


def logs_of(project: Project, run: str | None) -> RunLogs:
    """Return the logs of a run, by default of the newest."""
    folder = named_run(project, run)
    numbers = sorted(int(path.name[4:-3]) for path in folder.path.glob("job-*.sh"))
    jobs = [
        found
        for number in numbers
        for title, path in (
            (f"job {number}", folder.job(number).log),
            (f"agents of job {number}", folder.job(number).agents.log),
        )
        if (found := _file(title, path))
    ]
    members = [found for path in folder.logs.glob("*.log") if (found := _file(path.stem, path))]
    members.sort(key=lambda log: (-log.written_at, log.name))
    return RunLogs(folder.name, tuple(jobs), tuple(members))


def job_log(project: Project, run: str | None, number: int) -> LogPart:
    """Return the log of a job: the output of its script and of the driver."""
    folder = named_run(project, run)
    path = folder.job(number).log
    if not path.exists():
        raise BadInputError(
            f"job {number} of run {folder.name} has no log", f"`hetctl logs {folder.name}` lists the logs"
        )
    return LogPart(folder.name, path)


def member_log(project: Project, run: str | None, member: str, index: int | None, *, every: bool) -> LogPart:
    """Return a member's log of its newest task.

    Parameters
    ----------
    index : int or None
        Round of the task instead of the newest.
    every : bool
        True for the whole log.

    Raises
    ------
    BadInputError
        If the run has no such member, or the member no task in that round.
    """
    folder = named_run(project, run)
    path = folder.log_of(member)
    tasks = _tasks(folder, member)
    if not path.exists() and not tasks and member not in {m.name for m in read_spec(folder).ensemble.members}:
        raise BadInputError(
            f"run {folder.name} has no member {member!r}", f"`hetctl status {folder.name}` shows its members"
        )
    if every or (not tasks and index is None):
        return LogPart(folder.name, path)
    at = max((at for at, (number, _) in enumerate(tasks) if index in (None, number)), default=None)
    if at is None:
        rounds = ", ".join(str(number) for number in dict.fromkeys(number for number, _ in tasks)) or "none"
        raise BadInputError(
            f"{member} did not train in round {index} of run {folder.name}", f"its rounds: {rounds}"
        )
    end = tasks[at + 1][1] if at + 1 < len(tasks) else None
    return LogPart(folder.name, path, tasks[at][0], tasks[at][1], end)


def text_of(part: LogPart, lines: int | None = None) -> Iterator[str]:
    """Yield the text of a part, or its last lines, in pieces; nothing if there is no log yet."""
    try:
        with part.path.open("rb") as file:
            size = file.seek(0, 2)
            end = size if part.end is None else min(part.end, size)
            position = part.start if lines is None else max(part.start, _begin_of_last(file, end, lines))
            file.seek(position)
            # A piece may end within a character of several bytes.
            decode = codecs.getincrementaldecoder("utf-8")("replace").decode
            while position < end and (data := file.read(min(CHUNK, end - position))):
                position += len(data)
                yield decode(data)
    except FileNotFoundError:
        return


def appended(project: Project, part: LogPart, start: int) -> Iterator[str]:
    """Yield what is appended to a log after byte `start` until the run has ended."""
    # Imported here: most logs are not followed.
    from hetctl.app.run.status import RunWatch

    watch = RunWatch(project, part.run)
    goes_on = True
    while goes_on:
        # Asked first: what was written before the end is then read.
        goes_on = watch.poll(0).state in UNDER_WAY
        data = _after(part.path, start)
        # A character of several bytes, or a line, is not yet whole.
        whole = data[: data.rfind(b"\n") + 1] if goes_on else data
        start += len(whole)
        if whole:
            yield whole.decode(errors="replace")
        if goes_on:
            time.sleep(project.waits.run_poll_s)


def length_of(part: LogPart) -> int:
    """Return the length of the log's file; 0 if it does not exist yet."""
    try:
        return part.path.stat().st_size
    except FileNotFoundError:
        return 0


def _file(name: str, path: Path) -> LogFile | None:
    try:
        known = path.stat()
    except FileNotFoundError:
        return None
    return LogFile(name, str(path), known.st_size, known.st_mtime)


def _tasks(folder: RunFolder, member: str) -> list[tuple[int, int]]:
    """Return the round of each task of a member, and the length of its log before it, in order."""
    try:
        text = folder.events_of(DRIVER).read_bytes()
    except FileNotFoundError:
        return []
    # Only lines with the name are parsed: a large run has a million others.
    named, found, at = json.dumps(member).encode(), [], -1
    while (at := text.find(named, at + 1)) >= 0:
        begin, end = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
        if end >= 0 and text.startswith(STARTED, begin):
            event = json.loads(text[begin:end])
            if event.get("member") == member:
                found.append((int(event["round"]), int(event["log_start"])))
    return found


def _begin_of_last(file: BinaryIO, end: int, lines: int) -> int:
    """Return where the last lines before a position begin."""
    begin, left = end, lines
    while begin and left:
        size = min(CHUNK, begin)
        begin = file.seek(begin - size)
        data = file.read(size)
        # The end of the last line is not the end of the line before it.
        at = size - (begin + size == end and data.endswith(b"\n"))
        while (at := data.rfind(b"\n", 0, at)) >= 0:
            left -= 1
            if not left:
                return begin + at + 1
    return end if not lines else 0


def _after(path: Path, start: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except FileNotFoundError:
        return b""


def tail_of(path: Path, said: str = "") -> tuple[str, ...]:
    """Return the last lines of a log, without those that `said` contains; none if there is no log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - TAIL_BYTES))
            # Reading may begin within a character of several bytes.
            text = log.read().decode(errors="replace")
    except OSError:
        return ()
    lines = (line.rstrip() for line in text.splitlines())
    return tuple(line for line in lines if line.strip() and line.strip() not in said)[-TAIL_LINES:]
