"""What submitit keeps of a call is nobody else's to read or to write."""

from __future__ import annotations

import os
import time

import pytest
import submitit

from hetctl.cluster.batch.base import FunctionCall, SubmissionInDoubtError
from hetctl.cluster.batch.submitit_jobs import submit_function, write_call
from hetctl.model.errors import BadInputError, BatchSystemError
from hetctl.model.site import Queue, Site

SITE = Site("s", "slurm", "srun", 1, 2, 2, 2**30, (Queue("main"),), device="slot")


def test_files_and_folders_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        write_call(tmp_path / "home" / "profiles" / "a", time.sleep, "x", "1", 60)
    finally:
        os.umask(before)
    paths = list((tmp_path / "home").rglob("*"))
    assert len(paths) >= 3
    assert [path for path in paths if path.stat().st_mode & 0o077] == []


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(BadInputError, match=f"{shared} is writable for all users"):
        write_call(shared / "home", time.sleep, "x", "1", 60)
    shared.chmod(0o1777)
    write_call(shared / "other", time.sleep, "x", "1", 60)


def test_a_call_that_is_there_is_not_written_again(tmp_path):
    for argument in ("first", "second"):
        write_call(tmp_path, time.sleep, argument, "1", 60)
    assert submitit.core.utils.DelayedSubmission.load(tmp_path / "1_submitted.pkl").args == ("first",)


@pytest.mark.parametrize(
    ("script", "in_doubt"),
    [
        ("echo sbatch: error: invalid partition >&2; exit 1", False),
        ("echo sbatch: error: Socket timed out on send/recv operation >&2; exit 1", True),
        ("echo sbatch: error: what no table has >&2; exit 1", True),
        ("kill -KILL $$", True),
        ("echo nonsense", True),
    ],
)
def test_a_failed_submission_is_in_doubt_unless_it_was_refused(tmp_path, monkeypatch, script, in_doubt):
    for command in ("sbatch", "srun"):
        (tmp_path / command).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    call = FunctionCall(time.sleep, ("x",), tmp_path / "calls", "call", SITE, SITE.queues[0], 1, 60)
    with pytest.raises(BatchSystemError) as failed:
        submit_function(call, "slurm", {}, ("invalid partition",))
    assert isinstance(failed.value, SubmissionInDoubtError) == in_doubt
