"""Processes are distinguished even if the kernel uses a number again."""

from __future__ import annotations

import os
import resource
import signal
import subprocess

from workbench import wait_for

from hetctl.storage.processes import MOST_DESCRIPTORS, Process, die_with_parent, raise_descriptor_limit


def test_a_process_is_known_by_its_number_and_its_start():
    child = subprocess.Popen(["sleep", "30"], start_new_session=True)
    known = Process.of(child.pid)
    assert known.alive
    assert known.group_alive
    another = Process(known.pid, known.started - 1)
    assert not another.alive
    assert not another.group_alive
    child.kill()
    wait_for(lambda: not known.alive)  # a zombie is not alive
    child.wait()
    assert not known.group_alive


def test_a_group_lives_as_long_as_any_of_it():
    leader = subprocess.Popen(["bash", "-c", "sleep 30 & exit 0"], start_new_session=True)
    known = Process.of(leader.pid)
    leader.wait()
    assert (known.alive, known.group_alive) == (False, True)
    os.killpg(leader.pid, signal.SIGKILL)
    wait_for(lambda: not known.group_alive)


def test_a_process_that_only_its_owner_can_see_is_alive(monkeypatch):
    def forbidden(_pid, _signal):
        raise PermissionError

    assert not Process(2**70, 1).alive
    monkeypatch.setattr(os, "kill", forbidden)
    assert Process(2**70, 1).alive


def test_a_child_gets_the_signal_if_its_parent_ended_before():
    ask = die_with_parent(signal.SIGKILL)
    first = os.fork()
    if first == 0:  # a child that asks on behalf of a parent that is not its own
        if os.fork() == 0:
            ask()
            os._exit(0)  # never reached
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]) & 0xFF)
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == (-signal.SIGKILL) & 0xFF


def test_a_process_may_open_as_many_files_as_it_can_allow():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, MOST_DESCRIPTORS), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
