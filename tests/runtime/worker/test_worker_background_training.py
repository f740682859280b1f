"""Trainings in a process of their own: results, rest, and the end of either process."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from contextlib import closing

import numpy as np
import psutil
import pytest
from workbench import wait_for

from hetctl.methods.balance.predictors.learner import narx
from hetctl.runtime.worker.background_training import BackgroundTraining
from hetctl.storage.processes import Process


def waiting():
    """Return a training of two workers."""
    predictor, draw = narx(2, 0), np.random.default_rng(0)
    while predictor.training is None:
        cpu, memory = draw.uniform(0.2, 1.0, (2, 2))
        predictor.observe(80 * cpu * draw.lognormal(0.0, 0.1, 2), cpu, memory)
    return predictor.training


@pytest.fixture(scope="module")
def others():
    """Return the processes that tests before have started, such as daemons of a cluster."""
    return set(psutil.Process().children())


@pytest.fixture
def processes(others):
    """Return a function that returns the processes that train for this one, until they are reaped."""
    return lambda: [child for child in psutil.Process().children() if child not in others]


def found_by(background):
    return wait_for(lambda: (found := background.result()) is not None and [found])[0]


@pytest.fixture
def duty():
    """Share of a core's time at which a training need not wait for the one before it."""
    return 1e9


@pytest.fixture
def background(processes, duty):
    with closing(BackgroundTraining(duty)) as background:
        background.start()
        yield background
    wait_for(lambda: not processes())


def test_a_result_is_that_of_this_process_to_the_bit(background):
    training = waiting()
    background.offer(training)
    found = found_by(background)
    assert found.tobytes() == training.fitted().tobytes()
    assert background.result() is None


def test_without_a_process_nothing_is_trained(processes):
    with closing(BackgroundTraining()) as idle:
        idle.offer(waiting())
        assert idle.result() is None
        assert processes() == []


def test_one_process_of_the_lowest_priority_trains_repeatedly(background, processes):
    numbers = set()
    for _ in range(3):
        background.offer(waiting())
        found_by(background)
        (process,) = processes()
        numbers.add(process.pid)
        assert process.nice() == 19
        assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
    assert len(numbers) == 1


@pytest.mark.parametrize(("duty", "rests"), [(1e-9, True), (1e9, False)])
def test_after_a_training_the_process_rests(background, processes, rests):
    background.offer(waiting())
    found_by(background)
    background.offer(waiting())
    # A training that was taken on ends before the process does.
    background.close()
    wait_for(lambda: not processes())
    assert (background.result() is None) == rests


def test_a_training_that_is_under_way_keeps_others_out(background, processes):
    for _ in range(3):
        background.offer(waiting())
    found_by(background)
    background.close()
    wait_for(lambda: not processes())
    assert background.result() is None


def test_signals_to_the_job_do_not_end_a_training(background, processes):
    background.offer(waiting())
    found_by(background)
    (process,) = processes()
    for number in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    background.offer(waiting())
    found_by(background)


def test_after_its_process_was_killed_nothing_is_trained(background, processes, capfd):
    background.offer(waiting())
    found_by(background)
    (process,) = processes()
    process.kill()
    wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE)
    background.offer(waiting())
    wait_for(lambda: "training of the speed predictor has failed" in capfd.readouterr().out)
    background.offer(waiting())
    assert background.result() is None


PARENT = """
import pickle, psutil, sys, time
from hetctl.runtime.worker.background_training import BackgroundTraining
background = BackgroundTraining(1e9)
background.start()
training = pickle.load(sys.stdin.buffer)
background.offer(training)
while background.result() is None:
    time.sleep(0.01)
if sys.argv[1] == "training":
    background.offer(training)
print(psutil.Process().children()[0].pid, flush=True)
if sys.argv[1] != "ended":
    time.sleep(600)
"""


@pytest.mark.parametrize("when", ["idle", "training", "ended"])
def test_the_process_ends_with_its_parent(when, tmp_path):
    """Whether the parent is killed, or ends without closing it."""
    command, pipe = (sys.executable, "-c", PARENT, when), subprocess.PIPE
    with (tmp_path / "errors").open("wb") as errors:
        parent = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors)
    with parent:
        pickle.dump(waiting(), parent.stdin)
        parent.stdin.close()
        child = Process.of(int(parent.stdout.readline()))
        if when == "ended":
            assert parent.wait() == 0
        else:
            parent.kill()
        wait_for(lambda: not child.alive)
    assert (tmp_path / "errors").read_bytes() == b""
