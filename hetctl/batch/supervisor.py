"""Holds a local job to its wall-clock limit and keeps its end: ``python -m hetctl.batch.supervisor``."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hetctl.batch.ends import end_file
from hetctl.core.layout import write_json

CANCEL_GRACE_S = 20.0


def main() -> int:
    """Run a script in a process group of its own; TERM to it at its limit or when told, then KILL to all."""
    parser = argparse.ArgumentParser(prog="python -m hetctl.batch.supervisor", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("wall_s", type=float)
    parser.add_argument("script")
    arguments = parser.parse_args()
    end = _supervise(arguments.script, arguments.wall_s)
    write_json(end_file(arguments.folder, os.getpid()), end)
    return 0


def _supervise(script: str, wall_s: float) -> dict[str, Any]:
    told: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append("cancelled"))
    job = subprocess.Popen(["bash", script], start_new_session=True)
    limit, ended_by = time.monotonic() + wall_s, None
    while (code := job.poll()) is None:
        now = time.monotonic()
        if ended_by is None and (told or now >= limit):
            ended_by, limit = told[0] if told else "timeout", now + CANCEL_GRACE_S
            job.send_signal(signal.SIGTERM)  # to the script alone, which tells its steps in order
        elif now >= limit:
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
