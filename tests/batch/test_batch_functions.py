"""What submitit keeps of a call is nobody else's to read or to write."""

from __future__ import annotations

import os
import time

import pytest

from hetctl.batch.base import FunctionCall
from hetctl.batch.functions import write_call
from hetctl.core.errors import BadInputError
from hetctl.core.site import Queue, Site

SITE = Site("local", "local", "local", 1, 2, 2, 2**30, (Queue("local"),), device="slot")


def call(folder):
    return FunctionCall(time.sleep, ("x",), folder, "call", SITE, SITE.queues[0], 1, 60)


def test_files_and_folders_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        write_call(call(tmp_path / "home" / "profiles" / "a"), "x", "1")
    finally:
        os.umask(before)
    paths = list((tmp_path / "home").rglob("*"))
    assert len(paths) >= 3
    assert [path for path in paths if path.stat().st_mode & 0o077] == []


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(BadInputError, match=f"everybody may write to {shared}"):
        write_call(call(shared / "home"), "x", "1")
    shared.chmod(0o1777)
    write_call(call(shared / "other"), "x", "1")
