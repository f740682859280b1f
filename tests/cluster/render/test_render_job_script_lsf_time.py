"""How LSF's scripts ask what is left of their time, and what they make of the answers."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from pathlib import Path

import pytest
from test_render_job_script import SITES, job, prepare
from test_render_job_script_ending import deadline_of

GRACE_S, WALL_S = 90, 5430


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        ("echo '0:42 L'", 2520),
        ("echo '   1:9 L '", 4140),
        ("echo '1:29 L'", 5340),
        ("echo '1:30 L'", WALL_S),
        ("echo '2:00 L'", WALL_S),
        ("echo '0:08 L'", 480),
        ("echo '0:42 E'", WALL_S),
        ("echo '0:0 X'", WALL_S),
        ("echo '-'", WALL_S),
        ("echo '0:42 L'; exit 255", 2520),
        ("echo 'LSF is down. Please wait ...' >&2; exit 255", WALL_S),
        ("echo '123456789:42 L'", WALL_S),
        ("echo '-0:42 L'", WALL_S),
        ("echo 'a[$(touch owned)]:00 L'", WALL_S),
        ("true", WALL_S),
    ],
)
def test_the_time_left_is_that_of_bjobs_if_it_is_usable(tmp_path: Path, answer: str, left: int) -> None:
    site = dataclasses.replace(SITES["summit"], setup=(), directives=())
    script = job(site, wall_s=WALL_S, grace_s=GRACE_S)
    records, _, environment = prepare(tmp_path, script, "true")
    bjobs = tmp_path / "bin" / "bjobs"
    bjobs.parent.mkdir()
    bjobs.write_text(f'#!/bin/sh\n[ "$*" = "-noheader -o time_left 4711" ] || exit 9\n{answer}\n')
    bjobs.chmod(0o755)
    environment |= {"PATH": f"{bjobs.parent}{os.pathsep}{environment['PATH']}", "LSB_JOBID": "4711"}
    before = int(time.time())
    command = ["bash", str(tmp_path / "runs" / "digits-1" / "job-0002.sh")]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=60)
    assert before <= deadline_of(records) - left + GRACE_S <= time.time()
    assert not (tmp_path / "owned").exists()
