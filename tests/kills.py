"""Kills hetctl at any of its steps: a command runs in a forked process that dies before its n-th line.

Lines of the modules in `TRACED` count. Those of `subprocess` are among them, so that some kills come
while a command of the batch system runs. A line counts `MOST_VISITS` times at most: loops that wait take more
turns on a loaded machine, and kills would come too late in others.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

from workbench import ProjectFolder

KILLS = int(os.environ.get("HETCTL_KILLS", "12"))
"""Kills of a command; tests in which each kill costs a job have a part of them, the weekly workflow more."""
MOST_VISITS = 3
TRACED = (
    *("/hetctl/app/run/submission.py", "/hetctl/app/run/lifecycle.py", "/hetctl/app/run/job_states.py"),
    *("/hetctl/app/run/spec.py", "/hetctl/app/run/next_state.py", "/hetctl/app/profile/jobs.py"),
    *("/hetctl/app/project.py", "/hetctl/catalog/catalog.py", "/hetctl/catalog/lock.py"),
    *("/hetctl/storage/paths.py", "/hetctl/storage/profile_request.py"),
    *("/hetctl/cluster/batch/command.py", "/hetctl/cluster/batch/submitit_executor.py"),
    *("/hetctl/cluster/batch/slurm.py", "/hetctl/cluster/batch/local.py", subprocess.__file__),
)


def lines_of(project: ProjectFolder, *arguments: str) -> int:
    """Run a command to its end; return how many lines that took."""
    reader, writer = os.pipe()
    assert _in_child(project, arguments, None, writer) == 0
    os.close(writer)
    with os.fdopen(reader) as counts:
        return int(counts.read())


def killed(project: ProjectFolder, line: int, *arguments: str) -> bool:
    """Run a command that is killed before a line; return whether it got as far as that."""
    return _in_child(project, arguments, line) == -signal.SIGKILL


def at_once(project: ProjectFolder, *commands: str) -> list[int]:
    """Run commands side by side; return their exit codes."""
    pids = []
    for command in commands:
        if (pid := os.fork()) == 0:
            _be_traced(project, [command], None, -1)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def spread(lines: int, kills: int) -> Iterable[int]:
    """Return so many of the lines, evenly."""
    return sorted({1 + index * lines // kills for index in range(kills)})


def _in_child(project: ProjectFolder, arguments: Iterable[str], line: int | None, report: int = -1) -> int:
    pid = os.fork()
    if pid == 0:
        _be_traced(project, arguments, line, report)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _be_traced(project: ProjectFolder, arguments: Iterable[str], line: int | None, report: int) -> None:
    """Run the command and leave this process, whatever happens."""
    seen = [0]
    code = 70
    try:
        sys.settrace(_tracer(seen, line))
        code = project.here(*arguments).code
        sys.settrace(None)
        if report >= 0:
            os.write(report, str(seen[0]).encode())
    finally:
        os._exit(code)


def _tracer(seen: list[int], line: int | None) -> Callable[[FrameType, str, Any], Any]:
    visits: Counter[tuple[object, int]] = Counter()

    def of_line(frame: FrameType, event: str, _argument: Any) -> Any:
        place = frame.f_code, frame.f_lineno
        visits[place] += event == "line"
        if event == "line" and visits[place] <= MOST_VISITS:
            seen[0] += 1
            if seen[0] == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return of_line

    counted: dict[CodeType, bool] = {}

    def of_call(frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        if (counts := counted.get(code)) is None:
            # Bodies of modules and classes run once in a process, and in none that is forked after that.
            is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
            counts = counted[code] = is_function and code.co_filename.endswith(TRACED)
        return of_line if counts else None

    return of_call
