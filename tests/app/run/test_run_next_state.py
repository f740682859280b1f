"""What the ends of jobs mean for their run."""

from __future__ import annotations

import time

import pytest

from hetctl.app.run.next_state import (
    IDLE_JOBS,
    NODE_FAILURES,
    excluded_nodes,
    idle_jobs,
    progressed_at,
    used_until_now,
)
from hetctl.model.events import Event
from hetctl.model.job import Job, JobState


def job(number, state, submitted_at=None, failed_nodes=()):
    at = 100.0 * number if submitted_at is None else submitted_at
    return Job(number, f"j{number}", str(number), state, 1, 60, at, at + 50, failed_nodes=failed_nodes)


def jobs(*states):
    return [job(number, state) for number, state in enumerate(states)]


def saved(member, time, epoch, part_samples=0):
    return Event(member, 0, "checkpoint", time, {"epoch": epoch, "part_samples": part_samples})


@pytest.mark.parametrize("state", [JobState.FINISHED, JobState.FAILED, JobState.TIMEOUT, JobState.VANISHED])
def test_jobs_that_got_nothing_done_are_held_against_the_run(state):
    assert len(idle_jobs(jobs(state, state), [])) == IDLE_JOBS


@pytest.mark.parametrize("state", [JobState.PREEMPTED, JobState.CANCELLED])
def test_ends_that_are_nobodys_fault_are_free(state):
    assert idle_jobs(jobs(*[state] * 20), []) == []


def test_failures_of_nodes_are_free_up_to_a_number():
    failures = jobs(*[JobState.NODE_FAILED] * (NODE_FAILURES + 1))
    assert idle_jobs(failures[:-1], []) == []
    assert idle_jobs(failures, []) == failures


def test_progress_after_submission_clears_a_job_and_earlier_ones():
    ended = jobs(JobState.FAILED, JobState.FAILED, JobState.FAILED)
    assert idle_jobs(ended, [150.0]) == [ended[2]]
    assert idle_jobs(ended, [220.0]) == []


def test_only_getting_further_than_ever_is_progress():
    events = [
        saved("a", 1, 1),
        saved("a", 2, 1),
        saved("b", 3, 0, 10),
        saved("b", 4, 0, 5),
        saved("a", 5, 1, 2),
    ]
    assert progressed_at(events) == [1, 3, 5]


def test_tasks_of_killed_drivers_use_nothing_after_their_last_event():
    at = time.time() - 3600
    placement = [{"node": "n", "gpus": [0, 1]}]
    started = Event("driver", 0, "task_started", at, {"member": "a", "gpus": 2, "placement": placement})
    events = [started, saved("a", at + 60, 1)]
    assert used_until_now(events, jobs(JobState.FAILED)).gpu_seconds == pytest.approx(120)
    assert used_until_now(events, jobs(JobState.RUNNING)).gpu_seconds == pytest.approx(7200, abs=100)


def test_a_checkpoint_of_nothing_is_no_progress():
    assert progressed_at([saved("a", 1, 0)]) == []


def test_failed_nodes_are_excluded_while_enough_others_are_left():
    ended = [
        job(0, JobState.NODE_FAILED, failed_nodes=("n2",)),
        job(1, JobState.NODE_FAILED, failed_nodes=("n1", "n2")),
    ]
    assert excluded_nodes(ended, nodes=4, needed=2) == ("n1", "n2")
    assert excluded_nodes(ended, nodes=4, needed=3) == ("n1",)
    assert excluded_nodes(ended, nodes=4, needed=4) == ()
    assert excluded_nodes(jobs(JobState.FAILED), nodes=4, needed=1) == ()
