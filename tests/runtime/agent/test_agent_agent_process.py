"""Agents that die, lose their driver or end in order, each a child of a keeper in a forked process."""

from __future__ import annotations

import os
import signal
import time

import pytest
from workbench import wait_for

from hetctl.runtime.agent.agent_process import DRIVER_LOST, KILLED, MOST_RESTARTS, Keeper
from hetctl.runtime.agent.rank_template import run_to_the_end
from hetctl.storage.processes import Process


def forked_keeper(live, keeper=Keeper):
    """Return the process of a keeper that keeps this alive."""
    pid = os.fork()
    if pid == 0:
        run_to_the_end(lambda: keeper().keep(live))
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
    assert end_of(forked_keeper(lambda is_first: DRIVER_LOST if lives(is_first) < most else 0)) == 0
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


def test_a_signal_that_comes_with_the_end_of_an_agent():
    def live(_is_first):
        # It runs before its keeper does, which therefore finds the signal when it has the exit code.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGTERM)
        os._exit(0)

    def idle_keeper():
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return Keeper()

    # Few: on a busy machine an idle process waits for seconds.
    ends = [end_of(forked_keeper(live, idle_keeper)) for _ in range(5)]
    assert ends == [0] * 5
