"""What the ends of jobs mean for their run."""

from __future__ import annotations

import json
import time

import pytest

from hetctl.app.run import job_states
from hetctl.app.run.job_states import (
    IDLE_JOBS,
    NODE_FAILURES,
    excluded_nodes,
    idle_jobs,
    reason_to_end,
    used_until_now,
)
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.job import Job, JobState, RunReason
from hetctl.model.run import RunSpec
from hetctl.model.site import Queue, Site
from hetctl.model.training_progress import PAUSED, Progress
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_state import RunState


def job(number, state, submitted_at=None, failed_nodes=()):
    at = 100.0 * number if submitted_at is None else submitted_at
    return Job(number, f"j{number}", str(number), state, 1, 60, at, at + 50, failed_nodes=failed_nodes)


def jobs(*states):
    return [job(number, state) for number, state in enumerate(states)]


@pytest.mark.parametrize("state", [JobState.FINISHED, JobState.FAILED, JobState.TIMEOUT, JobState.VANISHED])
def test_jobs_that_got_nothing_done_are_held_against_the_run(state):
    assert len(idle_jobs(jobs(state, state), 0.0)) == IDLE_JOBS


@pytest.mark.parametrize("state", [JobState.PREEMPTED, JobState.CANCELLED])
def test_ends_that_are_nobodys_fault_are_free(state):
    assert idle_jobs(jobs(*[state] * 20), 0.0) == []


def test_failures_of_nodes_are_free_up_to_a_number():
    failures = jobs(*[JobState.NODE_FAILED] * (NODE_FAILURES + 1))
    assert idle_jobs(failures[:-1], 0.0) == []
    assert idle_jobs(failures, 0.0) == failures


def test_progress_after_submission_clears_a_job_and_earlier_ones():
    ended = jobs(JobState.FAILED, JobState.FAILED, JobState.FAILED)
    assert idle_jobs(ended, 150.0) == [ended[2]]
    assert idle_jobs(ended, 220.0) == []


def test_tasks_of_killed_drivers_end_with_their_last_event(tmp_path):
    at, run = time.time() - 3600, RunFolder(tmp_path).create()
    placement = [{"node": "n", "gpus": [0, 1]}]
    task = {"kind": "task_started", "time": at, "member": "a", "gpus": 2, "placement": placement}
    run.events_of("driver").write_text(json.dumps(task) + "\n")
    saved = {"kind": "checkpoint", "time": at + 60, "epoch": 1, "part_samples": 0}
    run.events_of("a").write_text(json.dumps(saved) + "\n")
    state = RunState(run, Ensemble("e", "pytorch", Functions("m:i", "m:m"), (Member("a"),), "/x"), 2)
    state.refresh()
    assert used_until_now(state, jobs(JobState.FAILED)).gpu_seconds == pytest.approx(120)
    assert used_until_now(state, jobs(JobState.RUNNING)).gpu_seconds == pytest.approx(7200, abs=100)


def test_failed_nodes_are_excluded_while_enough_others_are_left():
    ended = [
        job(0, JobState.NODE_FAILED, failed_nodes=("n2",)),
        job(1, JobState.NODE_FAILED, failed_nodes=("n1", "n2")),
    ]
    assert excluded_nodes(ended, nodes=4, needed=2) == ("n1", "n2")
    assert excluded_nodes(ended, nodes=4, needed=3) == ("n1",)
    assert excluded_nodes(ended, nodes=4, needed=4) == ()
    assert excluded_nodes(jobs(JobState.FAILED), nodes=4, needed=1) == ()


@pytest.mark.parametrize(
    ("chain", "earlier", "ends"), [(True, 0, False), (False, 0, True), (False, 1, False)]
)
def test_a_run_stops_after_each_job_in_a_queue_that_permits_no_chain(tmp_path, chain, earlier, ends):
    queues = (Queue("batch"), Queue("debug", chain=chain))
    site = Site("s", "slurm", "srun", 4, 4, 8, 2**33, queues)
    ensemble = Ensemble("e", "pytorch", Functions("m:i", "m:m"), (Member("a"),), "/x")
    spec = RunSpec(*("e-001", ensemble, site, "fluid", 4, "debug", 3600, 180, (), "/c"), earlier_jobs=earlier)
    found = reason_to_end(spec, RunFolder(tmp_path).create(), jobs(JobState.FINISHED))
    assert (found is not None and found[0] is RunReason.BUDGET) == ends


@pytest.mark.parametrize(("reported", "reason"), [(0, RunReason.PAUSED), (1, RunReason.CONVERGED)])
def test_a_paused_trial_holds_up_the_end_only_while_its_search_waits_for_it(reported, reason):
    trial = Progress("t", asked=1, reported=reported, withheld=PAUSED)
    assert job_states._outcome({"t": trial}, "all are reported")[0] is reason
