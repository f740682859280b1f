"""One driver of a run trains at any time, with its ranks: one that stood still ends when it wakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from driven_job import Job
from one_driver import problems
from workbench import alive, kill_all, wait_for

from hetctl.model.events import DRIVER
from hetctl.model.job import SUPERSEDED_EXIT
from hetctl.model.site import Queue, Site, Timeouts
from hetctl.storage.atomic_io import write_json
from hetctl.storage.progress_fold import events_in

EPOCHS = 40
MEMBERS = {name: {"epochs": EPOCHS, "epoch_s": 0.25} for name in "ab"}


@pytest.fixture
def job(tmp_path):
    """Return a run whose drivers count as dead after six seconds without a sign of life."""
    queues, timeouts = (Queue("local"),), Timeouts(lease_s=6.0)
    site = Site("local", "local", "local", 1, 2, 2, 2**40, queues, device="slot", timeouts=timeouts)
    yield Job(tmp_path, MEMBERS, site=site)
    kill_all(str(tmp_path))


def training(job, number):
    """Start a job; return its driver once both members have finished an epoch in it."""
    driver = job.start(number)
    trained_in(job, number)
    return driver


def trained_in(job, number):
    wait_for(lambda: all(job_of(job, "epoch", name) == number for name in MEMBERS))


def job_of(job, kind, source):
    """Return the job of the last such event; None without any."""
    started = {event.data["job"]: event.round for event in job.events("job_started")}
    last = job.events(kind, source)[-1:]
    return max((number for number, first in started.items() if last and last[0].round >= first), default=None)


def check(job):
    wait_for(lambda: not alive(str(job.run.path)))
    assert problems(events_in(job.run), epochs=dict.fromkeys(MEMBERS, EPOCHS)) == []


def test_a_driver_that_stood_still_ends_when_it_wakes(job):
    frozen = training(job, 0)
    os.kill(frozen.pid, signal.SIGSTOP)
    following = training(job, 1)
    os.kill(frozen.pid, signal.SIGCONT)
    output, _ = frozen.communicate(timeout=60)
    assert frozen.returncode == SUPERSEDED_EXIT
    assert "ends at once: the lease could not be renewed in time" in output
    assert following.wait(120) == 0
    check(job)


def test_ranks_that_stood_still_write_nothing_for_a_dead_driver(job):
    killed = training(job, 0)
    ranks = [pid for pid in alive(str(job.run.path)) if pid != killed.pid]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    killed.kill()
    killed.communicate()
    following = training(job, 1)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    assert following.wait(120) == 0
    check(job)


def test_ranks_without_the_lease_are_no_failures_of_members(job):
    driver = training(job, 0)
    held = json.loads(job.run.lease.read_text())
    write_json(job.run.lease, {**held, "number": held["number"] + 1})
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == SUPERSEDED_EXIT, output
    assert job.events("task_ended") == []
    wait_for(lambda: not alive(str(job.run.path)))


def test_a_later_job_has_the_living_driver_end_in_order(job):
    living = training(job, 0)
    following = job.start(1)
    output, _ = living.communicate(timeout=60)
    assert living.returncode == 0
    assert "the driver of another job waits for the run" in output
    assert following.wait(120) == 0
    assert [event.data["reason"] for event in job.events("job_ended")] == ["signal", "finished"]
    check(job)


def test_an_earlier_job_gives_way_to_a_later_one(job):
    later = training(job, 1)
    earlier = job.start(0)
    output, _ = earlier.communicate(timeout=60)
    assert earlier.returncode == SUPERSEDED_EXIT
    assert "leaves: the driver of job 1" in output
    assert later.wait(120) == 0
    check(job)


@pytest.fixture(scope="module")
def two_jobs(tmp_path_factory):
    """Return the events of a run in two jobs."""
    job = Job(tmp_path_factory.mktemp("jobs"), {"a": {"epochs": 6, "epoch_s": 0.2}}, slots=1)
    first = job.start(0)
    wait_for(lambda: len(job.trained("a")) >= 2)
    first.terminate()
    first.communicate(timeout=60)
    job.drive(number=1)
    return events_in(job.run)


def moved(events, kind, source, **data):
    """Append the first such event of the first job once more, as if written at the end."""
    found = next(event for event in events if (event.kind, event.source) == (kind, source))
    end = max(event.seq for event in events if event.source == source) + 1
    return [*events, replace(found, seq=end, time=events[-1].time + 1, data={**found.data, **data})]


@pytest.mark.parametrize(
    ("kind", "source", "data", "words"),
    [
        ("epoch", "a", {}, "a: epoch of round 0 after one of round"),
        ("epoch", "a", {"epoch": 7}, "a: epoch of round 0 after one of round"),
        ("round_started", DRIVER, {}, "round 0 was started by job 0 and by job 0"),
        ("task_ended", DRIVER, {}, "task_ended of round 0 after job 1 began"),
        ("job_started", DRIVER, {}, "job 0 began at round 0, after job 1"),
    ],
)
def test_events_of_two_drivers_at_once_are_told(two_jobs, kind, source, data, words):
    assert problems(two_jobs, epochs={"a": 6}) == []
    assert any(words in found for found in problems(moved(two_jobs, kind, source, **data)))


@pytest.mark.parametrize("number", [1, 4, 6])
def test_lost_and_repeated_epochs_are_told(two_jobs, number):
    lost = [event for event in two_jobs if event.kind != "epoch" or event.data["epoch"] != number]
    assert problems(lost, epochs={"a": 6})
    last = max(event.round for event in two_jobs)
    again = [
        replace(e, round=last) for e in moved(two_jobs, "epoch", "a", epoch=number, finished_at=1.0)[-1:]
    ]
    assert any(
        "is trained after epoch 6" in found for found in problems([*two_jobs, *again], epochs={"a": 6})
    )


KILLER = """
import subprocess, sys
from workbench import kill_all
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]])
kill_all(sys.argv[1])
"""
"""Kills a process of its own group; the text is on its own command line, too."""


def test_a_clean_up_spares_the_group_of_the_tests(tmp_path):
    command = [sys.executable, "-c", KILLER, str(tmp_path / "text")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, start_new_session=True, env=environment, check=False).returncode == 0
