"""What Flux 0.80 printed, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetctl.cluster.batch.base import SubmissionInDoubtError
from hetctl.cluster.batch.command import Answer, CommandRunner
from hetctl.cluster.batch.flux import FluxBatch, find_command, parse_jobs
from hetctl.cluster.batch.queues import QueueFacts, parse_flux_queue
from hetctl.model.errors import BatchSystemError
from hetctl.model.job import JobState, JobStatus

CAPTURED = Path(__file__).parent / "captured"
QUEUES = "pdebug|\u2714|\u2714|1.5h|0-2\nbatch|\u2714|\u2717|inf|0-inf\n"


def test_jobs_of_0_80():
    assert parse_jobs((CAPTURED / "flux-0.80-jobs.txt").read_text()) == {
        "fDYLpeq5": JobStatus(JobState.PENDING, None, "SCHED"),
        "fr5VE55": JobStatus(JobState.RUNNING, None, "RUN"),
        "fDBZWiij": JobStatus(JobState.CANCELLED, None, "cancel"),  # while it waited
        "fCuqkLQf": JobStatus(JobState.FINISHED, 0, "COMPLETED"),
        "fCWnVWDd": JobStatus(JobState.FAILED, 2, "FAILED"),
        "fdtK8eb": JobStatus(JobState.TIMEOUT, None, "timeout resource allocation expired"),
        "fYN5on7": JobStatus(JobState.CANCELLED, None, "cancel"),  # while it ran
    }
    assert parse_jobs("JobID fZZZ9 unknown\nf1|RUN\n") == {}


def test_ids_in_any_locale_and_names():
    parse_job_id = FluxBatch(Path()).parse_job_id
    assert parse_job_id("\u01922PuFovP\n") == parse_job_id("f2PuFovP\n") == "f2PuFovP"
    with pytest.raises(SubmissionInDoubtError, match="no job id"):
        parse_job_id("flux-batch: nothing")
    assert find_command("n", recorded=False)[:3] == ["flux", "jobs", "--name=n"]
    assert find_command("n", recorded=True)[:4] == ["flux", "jobs", "-a", "--name=n"]


def test_queues():
    assert parse_flux_queue(QUEUES, "pdebug") == QueueFacts(True, 2, 5400)
    assert parse_flux_queue(QUEUES, "batch") == QueueFacts(False, None, None)
    assert parse_flux_queue(QUEUES, "debug") is None


class Prepared(CommandRunner):
    """Gives one answer after the other."""

    def __init__(self, *answers):
        super().__init__(pauses_s=(0.0,))
        vars(self)["answers"] = [*answers]

    def run(self, _argv, _stdin=None):
        return self.answers.pop(0)


def test_cancelling_an_ended_job_is_no_error_but_a_refusal_is(tmp_path):
    over = "flux-cancel: ERROR: f1: job is inactive\nflux-cancel: ERROR: f2: unknown job id\n"
    refused = over + "flux-cancel: ERROR: f3: Operation not permitted\n"
    batch = FluxBatch(tmp_path, Prepared(Answer("", over, 1), Answer("", refused, 1)))
    batch.cancel(["f1", "f2"])
    with pytest.raises(BatchSystemError, match="not permitted"):
        batch.cancel(["f1", "f3"])
