"""The local batch system: detached processes on this machine, each under a supervisor."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetctl.batch.base import FunctionCall
from hetctl.batch.ends import end_file, read_end
from hetctl.batch.functions import submit_function
from hetctl.core.errors import BatchSystemError
from hetctl.core.job import JobState
from hetctl.core.layout import make_private_folder

ENDED_BY = {"timeout": JobState.TIMEOUT, "cancelled": JobState.CANCELLED}


class LocalBatch:
    """Jobs are known by the process ids of their supervisors.

    Parameters
    ----------
    folder : Path
        Where supervisors keep how their jobs ended.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def submit(self, script: Path, command: Sequence[str], wall_s: int) -> str:  # noqa: ARG002
        """Start the script's supervisor in a session of its own, with its output in the round's log."""
        make_private_folder(self._folder)
        supervisor = [sys.executable, "-m", "hetctl.batch.supervisor", str(self._folder), str(wall_s)]
        log = script.parent / "logs" / "job.log"
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "ab") as output:
                process = subprocess.Popen(
                    [*supervisor, str(script)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            raise BatchSystemError(f"cannot start {script}: {error}") from None
        end_file(self._folder, process.pid).unlink(missing_ok=True)  # of an earlier job with this number
        return str(process.pid)

    def call(self, call: FunctionCall) -> str:
        """Submit with submitit's local executor.

        Its processes are born deaf to the Ctrl-C of the terminal that they share with us.
        """
        heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            minutes = math.ceil(call.wall_s / 60)
            return submit_function(call, "local", {"timeout_min": minutes, "name": call.name})
        finally:
            signal.signal(signal.SIGINT, heard)

    def states(self, ids: Sequence[str]) -> Mapping[str, JobState]:
        """Look at the process, and at what its supervisor wrote."""
        return {job: self._state(int(job)) for job in ids}

    def cancel(self, ids: Sequence[str]) -> None:
        """Tell the supervisors; they give the scripts 20 s to checkpoint."""
        for job in ids:
            if self._state(int(job)) == JobState.RUNNING:
                os.kill(int(job), signal.SIGTERM)

    def _state(self, pid: int) -> JobState:
        alive = _is_alive(pid)  # asked first: it may end now, but not before it has written its end
        end = read_end(self._folder, pid)
        if end is not None:
            by_code = JobState.FINISHED if end["exit_code"] == 0 else JobState.FAILED
            return ENDED_BY.get(end["ended_by"], by_code)
        return JobState.RUNNING if alive else JobState.FAILED


def _is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    state = next(line for line in status.splitlines() if line.startswith("State:"))
    return state.split()[1] not in "ZX"
