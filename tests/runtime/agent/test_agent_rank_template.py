"""The template: ranks forked from a process that has imported the framework once."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
from pathlib import Path

import pytest
from workbench import wait_for

from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.agent.rank_template import CRASHED, RankEvent, Template
from hetctl.storage.processes import Process

LOADED: list[int] = []


def preload():
    assert not gc.isenabled()
    LOADED.append(os.getpid())


def serve(_binding, channel):
    """Send the process that loaded it, then act as requested."""
    collects = gc.isenabled() and gc.get_freeze_count() > 0
    channel.sendall(f"{LOADED[0]} {os.getppid()} {collects}\n".encode())
    wish = channel.recv(100).decode()
    if wish == "crash":
        raise ValueError("no such layer")
    if wish == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if wish == "leave":
        sys.exit(3)
    return 0 if wish == "end" else 9


def imported():
    """Return a template that has imported all."""
    template = Template(preload, serve)
    assert template.receive() is True
    return template


@pytest.fixture
def template():
    template = imported()
    yield template
    template.close()


def fork(template, gpu=0):
    """Fork a rank; return its process number and its channel."""
    ours, theirs = socket.socketpair()
    with theirs:
        template.fork(Binding("n1", gpu, None, (0,)), theirs)
    start = template.receive()
    assert start == RankEvent(gpu, start.pid)
    return start.pid, ours


ENDS = {"end": 0, "leave": 3, "crash": CRASHED, "die": 128 + signal.SIGKILL, "": 9}


@pytest.mark.parametrize(("wish", "exit_code"), ENDS.items(), ids=[wish or "hang up" for wish in ENDS])
def test_the_end_of_a_rank_is_reported_with_its_exit_code(template, wish, exit_code):
    pid, channel = fork(template, gpu=3)
    with channel:
        channel.recv(100)
        if wish:
            channel.sendall(wish.encode())
    assert template.receive() == RankEvent(3, pid, exit_code)


def test_ranks_share_the_modules_of_the_template(template):
    ranks = [fork(template, gpu) for gpu in range(3)]
    said = [channel.recv(100).decode().split() for _, channel in ranks]
    assert len({pid for pid, _ in ranks}) == 3
    assert len({(loaded, parent) for loaded, parent, _ in said}) == 1
    assert said[0][0] == said[0][1]
    for _, channel in ranks:
        channel.close()


def test_ranks_collect_garbage_of_their_own_alone(template):
    _, channel = fork(template)
    assert channel.recv(100).decode().split()[2] == "True"
    channel.close()


def test_ranks_end_with_their_template():
    template = imported()
    pid, channel = fork(template)
    rank = Process.of(pid)
    template_pid = int(channel.recv(100).split()[1])
    os.kill(template_pid, signal.SIGKILL)
    os.waitpid(template_pid, 0)
    wait_for(lambda: not rank.alive)
    assert template.receive() is False
    channel.close()


def test_a_template_ends_quietly_when_its_reports_are_not_read(capfd):
    template = imported()
    pid, channel = fork(template)
    template_pid = int(channel.recv(100).split()[1])
    os.kill(pid, signal.SIGKILL)
    # The end of the rank is reported.
    assert select.select([template], [], [], 60)[0]
    template.close()
    assert os.waitpid(template_pid, 0)[1] == 0
    assert capfd.readouterr().err == ""
    channel.close()


def test_a_template_ends_when_it_is_closed():
    template = imported()
    pid, channel = fork(template)
    template_pid = int(channel.recv(100).split()[1])
    template.close()
    assert os.waitpid(template_pid, 0)[1] == 0
    rank = Process.of(pid) if Path(f"/proc/{pid}").exists() else None
    wait_for(lambda: rank is None or not rank.alive)
    channel.close()
