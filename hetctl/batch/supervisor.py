"""Holds a local job to its wall-clock limit and keeps its end: ``python -m hetctl.batch.supervisor``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hetctl.core.layout import write_json

CANCEL_GRACE_S = 20.0


def main() -> int:
    """Run a script in a process group of its own; TERM at its limit or when told, then KILL."""
    parser = argparse.ArgumentParser(prog="python -m hetctl.batch.supervisor", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("wall_s", type=float)
    parser.add_argument("script")
    arguments = parser.parse_args()
    end = _supervise(arguments.script, arguments.wall_s)
    write_json(end_file(arguments.folder, os.getpid()), end)
    return 0


def end_file(folder: Path, pid: int) -> Path:
    """Return where the end of a job is kept: its exit code, and why it was ended if it was."""
    return folder / f"{pid}.json"


def read_end(folder: Path, pid: int) -> dict[str, Any] | None:
    """Return what a supervisor wrote, or None if it has not."""
    try:
        end: dict[str, Any] = json.loads(end_file(folder, pid).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return end


def _supervise(script: str, wall_s: float) -> dict[str, Any]:
    ended_by: str | None = None
    kill_at = float("inf")
    job = subprocess.Popen(["bash", script], start_new_session=True)

    def end(reason: str) -> None:
        nonlocal ended_by, kill_at
        if ended_by is None:
            ended_by, kill_at = reason, time.monotonic() + CANCEL_GRACE_S
            os.killpg(job.pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda *_: end("cancelled"))
    limit = time.monotonic() + wall_s
    while (code := job.poll()) is None:
        if time.monotonic() >= limit:
            end("timeout")
        if time.monotonic() >= kill_at:
            os.killpg(job.pid, signal.SIGKILL)
        time.sleep(0.1)
    _kill_leftovers(job.pid)
    return {"exit_code": code, "ended_by": ended_by}


def _kill_leftovers(group: int) -> None:
    """Leave nothing of a job running, as other batch systems do."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
