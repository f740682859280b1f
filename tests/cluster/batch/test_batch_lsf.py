"""What LSF prints, as it is documented and as others have captured it, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetctl.cluster.batch import batch_system_of
from hetctl.cluster.batch.base import JobRequest, SubmissionInDoubtError
from hetctl.cluster.batch.command import Answer, CommandRunner, NoAnswerError
from hetctl.cluster.batch.lsf import (
    REASONS,
    STATES,
    LsfBatch,
    bhist_command,
    bjobs_command,
    find_command,
    find_gone_command,
    parse_bhist,
    parse_bjobs,
    parse_found,
    parse_found_gone,
)
from hetctl.model.errors import BatchSystemError
from hetctl.model.job import JobState, JobStatus
from hetctl.model.site import Queue, Site

CAPTURED = Path(__file__).parent / "captured"
NOBODY = Answer("", "No matching job found\n", 255)
AWAY = Answer("", "LSF is down. Please wait ...\n", 255)

SITE = Site("s", "lsf", "mpirun", 4, 2, 8, 2**30, (Queue("q"),))


def captured(name):
    return (CAPTURED / name).read_text()


def record(stat, code="", reason="", hosts=""):
    return (
        f'{{"COMMAND":"bjobs","JOBS":1,"RECORDS":[{{"JOBID":"12","JOBINDEX":"0","STAT":"{stat}",'
        f'"EXIT_CODE":"{code}","EXIT_REASON":"{reason}","EXEC_HOST":"{hosts}","PEND_REASON":""}}]}}'
    )


def test_bjobs_of_10_1():
    assert parse_bjobs(captured("lsf-10.1-bjobs.documented.json")) == {
        "201": JobStatus(JobState.PENDING, None, "Job dependency condition not satisfied;"),
        "202": JobStatus(JobState.RUNNING, None, "RUN"),
        "203": JobStatus(JobState.FINISHED, 0, "DONE"),
        "204": JobStatus(JobState.FAILED, 7, "EXIT"),
        "205": JobStatus(
            JobState.TIMEOUT, 140, "TERM_RUNLIMIT: job killed after reaching LSF run time limit"
        ),
        "206": JobStatus(JobState.CANCELLED, None, "TERM_OWNER: job killed by owner"),
        "207": JobStatus(JobState.UNKNOWN, None, "UNKWN"),
        "208": JobStatus(JobState.RUNNING, None, "USUSP"),
        "209": JobStatus(
            JobState.OUT_OF_MEMORY, 137, "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit"
        ),
        "210": JobStatus(JobState.NODE_FAILED, None, "TERM_REMOVE_HUNG_JOB: job removed", ("a3",)),
    }


def test_bhist_of_10_1():
    """Its lines are folded, even within words, and a command may quote what LSF says."""
    assert parse_bhist(captured("lsf-10.1-bhist.documented.txt")) == {
        "301": JobStatus(
            JobState.OUT_OF_MEMORY, 1, "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit"
        ),
        "302": JobStatus(JobState.CANCELLED, None, "TERM_OWNER: job killed by owner"),
        "303": JobStatus(JobState.FINISHED, 0, "DONE"),
        "306": JobStatus(JobState.FINISHED, 0, "DONE"),
    }


def test_names_are_found_in_both():
    assert parse_found(captured("lsf-10.1-bjobs.documented.json"))["hetctl-run-0-1a2b3c4d"] == "202"
    found = parse_found_gone(captured("lsf-10.1-bhist.documented.txt"))
    assert found == {"hetctl-run-1-5e6f7a8b": "303", "requeued": "306", "lost": "305"}


@pytest.mark.parametrize("stat", STATES)
def test_stat_decides_and_the_exit_code_may_be_missing(stat):
    (status,) = parse_bjobs(record(stat)).values()
    assert (status.state, status.exit_code) == (STATES[stat], 0 if stat == "DONE" else None)


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_tells_why_a_job_was_ended(reason):
    (status,) = parse_bjobs(record("EXIT", "130", f"{reason}: words")).values()
    assert (status.state, status.exit_code, status.reason) == (REASONS[reason], 130, f"{reason}: words")


def test_a_node_is_blamed_only_if_there_is_just_one():
    one, several = (
        parse_bjobs(record("EXIT", "", "TERM_ZOMBIE: words", hosts))["12"]
        for hosts in ("42*a1", "42*a1:42*a2")
    )
    assert (one.failed_nodes, several.failed_nodes) == (("a1",), ())


@pytest.mark.parametrize(
    "text",
    ["", "No job found", "{", '{"RECORDS":{}}', "[1]", '{"RECORDS":[1,null,{"JOBID":"x","STAT":"DONE"}]}'],
)
def test_what_is_no_answer_tells_of_no_job(text):
    assert parse_bjobs(text) == parse_bhist(text) == parse_found(text) == parse_found_gone(text) == {}


def test_lines_before_the_answer_are_passed_over():
    text = "Cannot connect to LSF. Please wait ...\n" + record("DONE")
    assert parse_bjobs(text)["12"].state is JobState.FINISHED


def test_commands_about_jobs_name_them_all():
    assert bjobs_command(["7", "12"])[-2:] == ["7", "12"]
    assert bhist_command(["7", "12"]) == ["bhist", "-l", "7", "12"]
    assert find_command(["hetctl-a-1"])[-2:] == ["-J", "hetctl-a-1"]
    assert find_gone_command(["hetctl-a-1", "hetctl-b-1"]) == ["bhist", "-a", "-l", "-J", "hetctl-*"]


def test_the_id_of_a_submitted_job():
    said = "Cannot connect to LSF. Please wait ...\nJob <55> is submitted to default queue <normal>.\n"
    assert LsfBatch(Path()).parse_job_id(said) == "55"
    with pytest.raises(SubmissionInDoubtError, match="no job id"):
        LsfBatch(Path()).parse_job_id("Job not submitted.")


class Prepared(CommandRunner):
    """Answers each command with what is next for it, and keeps what was asked."""

    def __init__(self, answers):
        super().__init__(pauses_s=(0.0,))
        answers["asked"] = []
        vars(self)["answers"] = answers

    def run(self, argv, _stdin=None):
        self.answers["asked"].append([*argv])
        answer = self.answers[argv[0]].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def answers():
    return {}


@pytest.fixture
def batch(tmp_path, answers):
    return LsfBatch(tmp_path, Prepared(answers))


def test_what_bjobs_forgot_is_looked_up_once_in_bhist(batch, answers):
    answers["bjobs"] = [Answer(record("RUN"), "", 0)]
    answers["bhist"] = [Answer(captured("lsf-10.1-bhist.documented.txt"), "", 0)]
    states = {job: status.state for job, status in batch.statuses(["12", "303", "301", "305", "999"]).items()}
    assert states == {
        "12": JobState.RUNNING,
        "303": JobState.FINISHED,
        "301": JobState.OUT_OF_MEMORY,
        "305": JobState.UNKNOWN,
        "999": JobState.UNKNOWN,
    }
    assert answers["asked"][1] == ["bhist", "-l", "303", "301", "305", "999"]


@pytest.mark.parametrize("trouble", [NOBODY, AWAY, NoAnswerError("late")])
def test_without_history_a_forgotten_job_is_unknown(batch, answers, trouble):
    answers.update(bjobs=[Answer("", "Job <12> is not found\n", 255)], bhist=[trouble])
    assert batch.statuses(["12"]) == {"12": JobStatus(JobState.UNKNOWN)}


def test_an_lsf_that_is_away_is_asked_again_and_then_an_error(batch, answers):
    answers["bjobs"] = [AWAY, AWAY]
    with pytest.raises(BatchSystemError, match="LSF is down"):
        batch.statuses(["12"])
    assert len(answers["asked"]) == 2


def test_cancelling_an_ended_job_is_no_error_but_a_refusal_is(batch, answers):
    over = "Job <12>: Job has already finished\nJob <13>: No matching job found\n"
    answers["bkill"] = [Answer("Job <14> is being terminated\n", over, 255)]
    batch.cancel(["12", "13", "14"])
    assert answers["asked"] == [["bkill", "12", "13", "14"]]
    answers["bkill"] = [Answer("", over + "Job <15>: User permission denied\n", 255)]
    with pytest.raises(BatchSystemError, match="permission denied"):
        batch.cancel(["12", "13", "15"])


def test_bsub_is_run_once(batch, answers, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("true\n")
    request = JobRequest("j", script, ("bsub",), 60, SITE, 1)
    answers["bsub"] = [
        Answer("", "Failed in an LSF library call: Communication time out. Job not submitted.", 255)
    ]
    with pytest.raises(SubmissionInDoubtError):
        batch.submit(request)
    answers["bsub"] = [Answer("", "q: No such queue. Job not submitted.", 255)]
    with pytest.raises(BatchSystemError, match="No such queue") as caught:
        batch.submit(request)
    assert not isinstance(caught.value, SubmissionInDoubtError)
    assert len(answers["asked"]) == 2


def test_sites_with_lsf_get_it(tmp_path):
    assert isinstance(batch_system_of(SITE, tmp_path), LsfBatch)
