"""What OpenPBS 23.06 printed, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetctl.cluster.batch.base import JobRequest, SubmissionInDoubtError
from hetctl.cluster.batch.command import Answer, CommandRunner
from hetctl.cluster.batch.pbs import (
    ENDS,
    STATES,
    PbsBatch,
    find_command,
    parse_found,
    parse_qstat,
)
from hetctl.model.errors import BatchSystemError
from hetctl.model.job import JobState, JobStatus
from hetctl.model.site import Queue, Site

CAPTURED = Path(__file__).parent / "captured"
SITE = Site("s", "pbs", "mpiexec", 4, 2, 8, 2**30, (Queue("q"),))


def test_jobs_that_are_over():
    found = parse_qstat((CAPTURED / "openpbs-23.06-qstat.txt").read_text())
    ends = {job: (status.state, status.exit_code) for job, status in found.items()}
    assert ends == {
        "0.pbshead": (JobState.TIMEOUT, None),
        "1.pbshead": (JobState.FAILED, 7),
        "2.pbshead": (JobState.FAILED, 137),
        "3.pbshead": (JobState.FINISHED, 0),
        "4.pbshead": (JobState.CANCELLED, None),  # while it ran
        "5.pbshead": (JobState.CANCELLED, None),  # while it waited for 4
        "18.pbshead": (JobState.FINISHED, 0),
        "21.pbshead": (JobState.FINISHED, 0),  # without one of its nodes
        "23.pbshead": (JobState.NODE_FAILED, None),  # without its first node
    }
    # The comment is folded within a word.
    assert found["0.pbshead"].reason.endswith("(pbs2:ncpus=4:ngpus=2) and exceeded resource walltime")


def record(**fields):
    lines = "".join(f"    {name.replace('__', '.')} = {value}\n" for name, value in fields.items())
    return f"Job Id: 12.server\n{lines}\n"


def parsed(**fields):
    (status,) = parse_qstat(record(**fields)).values()
    return status


@pytest.mark.parametrize("letter", STATES)
def test_the_letter_decides(letter):
    status = parsed(job_state=letter, comment="words")
    over = letter == "F"  # never started: deleted
    assert status.state is (JobState.CANCELLED if over else STATES[letter])
    assert status.reason == ("words" if over or STATES[letter] is JobState.PENDING else letter)


@pytest.mark.parametrize("code", ENDS)
def test_why_pbs_itself_ended_a_job(code):
    assert parsed(job_state="F", Exit_status=code).state is ENDS[code]


def test_an_older_release_ends_a_job_at_its_limit_by_a_signal():
    times = {"resources_used__walltime": "00:10:02", "Resource_List__walltime": "00:10:00"}
    assert parsed(job_state="F", Exit_status=271, **times) == JobStatus(JobState.TIMEOUT, 143, "F")
    early = {**times, "resources_used__walltime": "00:09:00"}
    assert parsed(job_state="F", Exit_status=271, **early) == JobStatus(JobState.FAILED, 143, "F")


@pytest.mark.parametrize(
    "text", ["", "qstat: Unknown Job Id 9", "Job Id: x\n    job_state = F\n", "Job Id: 9.s\n"]
)
def test_what_is_no_answer_tells_of_no_job(text):
    assert parse_qstat(text) == {}


def test_ids_and_names():
    assert PbsBatch(Path()).parse_job_id("Welcome to the machine\n12.pbs-01.hsn\n") == "12.pbs-01.hsn"
    with pytest.raises(SubmissionInDoubtError, match="no job id"):
        PbsBatch(Path()).parse_job_id("qsub: nothing")
    assert find_command("n", "ann", recorded=False) == ["qselect", "-u", "ann", "-N", "n"]
    assert (parse_found("9.s\n12.s\n"), parse_found("")) == ("12.s", None)


class Prepared(CommandRunner):
    """Answers each command with what is next for it."""

    def __init__(self, **answers):
        super().__init__(pauses_s=(0.0,))
        vars(self)["answers"] = answers

    def run(self, argv, _stdin=None):
        return self.answers[argv[0]].pop(0)


def test_jobs_without_history_are_unknown_and_an_absent_server_is_an_error(tmp_path):
    away = Answer("", "qstat: cannot connect to server s (errno=15010)\n", 255)
    known = Answer(record(job_state="R"), "qstat: Unknown Job Id 13.server\n", 153)
    batch = PbsBatch(tmp_path, Prepared(qstat=[away, known, away, away]))
    states = {job: status.state for job, status in batch.statuses(["12.server", "13.server"]).items()}
    assert states == {"12.server": JobState.RUNNING, "13.server": JobState.UNKNOWN}
    with pytest.raises(BatchSystemError, match="cannot connect"):
        batch.statuses(["12.server"])


def test_cancelling_an_ended_job_is_no_error_but_a_refusal_is(tmp_path):
    over = "qdel: Job has finished 4.pbshead\nqdel: Unknown Job Id 9.pbshead\n"
    refused = over + "qdel: Unauthorized Request  5.pbshead\n"
    batch = PbsBatch(tmp_path, Prepared(qdel=[Answer("", over, 35), Answer("", refused, 159)]))
    batch.cancel(["4.pbshead", "9.pbshead"])
    with pytest.raises(BatchSystemError, match="Unauthorized"):
        batch.cancel(["4.pbshead", "5.pbshead"])


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("qsub: Unknown queue", True),
        ("qsub: Unknown resource: nono", True),
        ("qsub: Illegal attribute or resource value Resource_List.walltime", True),
        ("qsub: Account_Name is required to be set.", True),
        ("qsub: cannot connect to server pbshead (errno=15010)", False),
    ],
)
def test_after_a_refusal_there_is_no_job(tmp_path, words, refused):
    script = tmp_path / "job.sh"
    script.touch()
    batch = PbsBatch(tmp_path, Prepared(qsub=[Answer("", words, 170)]))
    with pytest.raises(BatchSystemError) as caught:
        batch.submit(JobRequest("j", script, ("qsub", str(script)), 60, SITE, 1))
    assert isinstance(caught.value, SubmissionInDoubtError) is not refused
