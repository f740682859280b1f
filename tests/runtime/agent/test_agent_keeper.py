"""Agents that die, lose their driver or end in order, each a child of a keeper in a forked process."""

from __future__ import annotations

import os
import signal
import time

import pytest
from workbench import wait_for

from hetctl.runtime.agent.keeper import KILLED, MOST_RESTARTS, RETURNS, Keeper
from hetctl.storage.processes import Process


def forked_keeper(live):
    """Return the process of a keeper that keeps this alive."""
    pid = os.fork()
    if pid == 0:
        os._exit(Keeper().keep(live))
    return pid


def end_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def lives(tmp_path):
    """A file to which each agent appends its number of lives before it, and the list of these."""
    file = tmp_path / "lives"
    file.touch()

    def note(is_first):
        with file.open("a") as lines:
            print(int(is_first), os.getpid(), file=lines)
        return len(file.read_text().splitlines())

    note.read = lambda: [tuple(map(int, line.split())) for line in file.read_text().splitlines()]
    return note


def test_an_agent_that_lost_its_driver_is_started_again(lives):
    most = MOST_RESTARTS + 3
    assert end_of(forked_keeper(lambda is_first: RETURNS if lives(is_first) < most else 0)) == 0
    assert [is_first for is_first, _ in lives.read()] == [1] + [0] * (most - 1)
    assert len({pid for _, pid in lives.read()}) == most


@pytest.mark.parametrize("code", [0, 1])
def test_an_agent_that_has_ended_is_not_started_again(lives, code):
    assert end_of(forked_keeper(lambda is_first: lives(is_first) and code)) == code
    assert len(lives.read()) == 1


def test_an_agent_that_is_killed_returns_a_few_times(lives):
    def live(is_first):
        lives(is_first)
        os.kill(os.getpid(), signal.SIGKILL)

    assert end_of(forked_keeper(live)) == KILLED
    assert len(lives.read()) == 1 + MOST_RESTARTS


def test_an_agent_without_its_template_returns_a_few_times(lives):
    assert end_of(forked_keeper(lambda is_first: lives(is_first) and KILLED)) == KILLED
    assert len(lives.read()) == 1 + MOST_RESTARTS


def test_sigterm_ends_an_agent_that_does_not_ignore_it(lives):
    keeper = forked_keeper(lambda is_first: lives(is_first) and time.sleep(1000))
    wait_for(lives.read)
    os.kill(keeper, signal.SIGTERM)
    assert end_of(keeper) == 128 + signal.SIGTERM


def test_an_agent_at_work_survives_sigterm_to_its_keeper(lives, tmp_path):
    def live(is_first):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lives(is_first)
        wait_for((tmp_path / "enough").exists)
        return 0

    keeper = forked_keeper(live)
    wait_for(lives.read)
    os.kill(keeper, signal.SIGTERM)
    (tmp_path / "enough").touch()
    assert end_of(keeper) == 0


def test_an_agent_ends_with_its_keeper(lives):
    keeper = forked_keeper(lambda is_first: lives(is_first) and time.sleep(1000))
    ((_, pid),) = wait_for(lives.read)
    agent = Process.of(pid)
    os.kill(keeper, signal.SIGKILL)
    end_of(keeper)
    wait_for(lambda: not agent.alive)
