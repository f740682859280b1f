"""What Slurm prints, as it was captured, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.batch import batch_system_of, process
from hetctl.batch.base import FunctionCall
from hetctl.batch.process import Answer
from hetctl.batch.slurm import (
    STATES,
    SlurmBatch,
    parse_job_id,
    parse_states,
    sacct_command,
    squeue_command,
)
from hetctl.core.errors import BatchSystemError
from hetctl.core.job import JobState
from hetctl.core.site import Queue, Site

SITE = Site("s", "slurm", "srun", 4, 2, 8, 2**30, (Queue("q"),))


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("123|COMPLETED", JobState.FINISHED),
        ("123|CANCELLED by 1000", JobState.CANCELLED),
        ("123|CANCELLED", JobState.CANCELLED),
        ("123|CANCELLED+", JobState.CANCELLED),
        ("123|OUT_OF_ME+", JobState.OUT_OF_MEMORY),
        ("123|OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
        ("123|NODE_FAIL", JobState.NODE_FAILED),
        ("123|TIMEOUT", JobState.TIMEOUT),
        ("123|PREEMPTED", JobState.PREEMPTED),
        ("123|COMPLETING", JobState.RUNNING),
        ("123|CONFIGURING", JobState.PENDING),
        ("123|REQUEUED", JobState.PENDING),
        ("  123|RUNNING  ", JobState.RUNNING),
        ("123|PENDI+", JobState.PENDING),
        ("123|COMPLET+", JobState.UNKNOWN),
        ("123|COMPLETE+", JobState.FINISHED),
        ("123|COMP", JobState.UNKNOWN),
        ("123|completed", JobState.UNKNOWN),
        ("123|+", JobState.UNKNOWN),
        ("123|HIBERNATING", JobState.UNKNOWN),
    ],
)
def test_states_of_squeue_and_sacct(line, state):
    assert parse_states(line) == {"123": state}


@pytest.mark.parametrize("text", ["", "\n\n", "slurm_load_jobs error: Invalid job id", "123|", "123| "])
def test_lines_without_a_state_say_nothing(text):
    assert parse_states(text) == {}


def test_several_lines_and_noise_around_them():
    text = "CLUSTER: alpha\nJOBID|STATE\n7|RUNNING\n8_3|PENDING\n8_[4-9]|PENDING\nlast login: today\n"
    states = parse_states(text)
    assert (states["7"], states["8_3"]) == (JobState.RUNNING, JobState.PENDING)
    assert states["JOBID"] is JobState.UNKNOWN


@given(st.text(alphabet="COMPLETEDING_+ |\n1x", max_size=60))
def test_nothing_is_finished_that_does_not_say_completed(text):
    finished = [job for job, state in parse_states(text).items() if state is JobState.FINISHED]
    for job in finished:
        assert any(
            line.strip().startswith(f"{job}|") and "COMPLETE" in line.partition("|")[2]
            for line in text.splitlines()
        )


@given(st.text(max_size=60).filter(lambda text: "COMPLETE" not in text))
def test_no_other_text_is_finished(text):
    assert JobState.FINISHED not in parse_states(f"1|{text}").values()


def test_each_state_of_slurm_is_read_as_itself():
    assert parse_states("\n".join(f"{name}|{name}" for name in STATES)) == STATES
    assert [name for name, state in STATES.items() if state is JobState.FINISHED] == ["COMPLETED"]


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("4711\n", "4711"),
        ("4711;alpha\n", "4711"),
        ("sbatch: warning: can't run 1 processes on 2 nodes\n4711", "4711"),
    ],
)
def test_the_job_id_that_sbatch_prints(text, job):
    assert parse_job_id(text) == job


@pytest.mark.parametrize("text", ["", "\n", "Submitted batch job 4711", "-1", ";alpha", "4711a"])
def test_anything_else_is_no_job_id(text):
    with pytest.raises(BatchSystemError, match="no job id"):
        parse_job_id(text)


def test_the_commands_ask_for_all_jobs_at_once():
    assert squeue_command(["1", "2"])[-1] == sacct_command(["1", "2"])[-1] == "--jobs=1,2"
    assert "--states=all" in squeue_command(["1"])


class FakeSlurm:
    """Answers by the first word of the command."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []
        self.read = []

    def __call__(self, argv, stdin=None):
        self.asked.append(list(argv))
        self.read.append(stdin)
        return self.answers[argv[0]]


def slurm_with(monkeypatch, **answers):
    fake = FakeSlurm(**answers)
    monkeypatch.setattr(process, "run", fake)
    return SlurmBatch(Path("unused")), fake


def test_jobs_that_squeue_has_forgotten_are_looked_up_in_the_accounting(monkeypatch):
    batch, fake = slurm_with(
        monkeypatch, squeue=Answer("1|RUNNING\n", "", 0), sacct=Answer("2|COMPLETED\n", "", 0)
    )
    assert batch.states(["1", "2", "3"]) == {
        "1": JobState.RUNNING,
        "2": JobState.FINISHED,
        "3": JobState.UNKNOWN,
    }
    assert fake.asked[1][-1] == "--jobs=2,3"


def test_a_single_job_that_is_gone_makes_squeue_fail_and_is_no_error(monkeypatch):
    gone = Answer("", "slurm_load_jobs error: Invalid job id specified", 1)
    batch, _ = slurm_with(monkeypatch, squeue=gone, sacct=Answer("", "", 0))
    assert batch.states(["1"]) == {"1": JobState.UNKNOWN}


def test_without_accounting_a_job_is_unknown_never_finished(monkeypatch):
    gone = Answer("", "slurm_load_jobs error: Invalid job id specified", 1)
    no_accounting = Answer("", "Slurm accounting storage is disabled", 1)
    batch, _ = slurm_with(monkeypatch, squeue=gone, sacct=no_accounting)
    assert batch.states(["1"]) == {"1": JobState.UNKNOWN}


def test_a_controller_that_is_away_is_an_error(monkeypatch):
    away = Answer("", "slurm_load_jobs error: Unable to contact slurm controller", 1)
    batch, _ = slurm_with(monkeypatch, squeue=away)
    with pytest.raises(BatchSystemError, match="Unable to contact slurm controller"):
        batch.states(["1"])


def test_nothing_is_asked_about_no_jobs(monkeypatch):
    batch, fake = slurm_with(monkeypatch)
    assert batch.states([]) == {}
    batch.cancel([])
    assert fake.asked == []


def test_submitting_and_cancelling(monkeypatch):
    batch, fake = slurm_with(monkeypatch, sbatch=Answer("12;alpha\n", "", 0), scancel=Answer("", "", 0))
    assert batch.submit(Path("job.sh"), ["sbatch", "--parsable", "job.sh"], 60) == "12"
    batch.cancel(["12", "13"])
    assert fake.asked[1] == ["scancel", "12", "13"]


def test_sbatch_reads_the_script_itself_where_the_command_does_not_name_it(monkeypatch):
    batch, fake = slurm_with(monkeypatch, sbatch=Answer("12\n", "", 0))
    batch.submit(Path("job.sh"), ["sbatch", "--parsable"], 60)
    batch.submit(Path("job.sh"), ["sbatch", "--parsable", "job.sh"], 60)
    assert fake.read == [Path("job.sh"), None]


def test_sbatch_that_refuses_is_quoted(monkeypatch):
    refusal = Answer("", "sbatch: error: invalid partition specified: q\nsbatch: error: Batch failed\n", 1)
    batch, _ = slurm_with(monkeypatch, sbatch=refusal)
    with pytest.raises(BatchSystemError, match="invalid partition specified: q / sbatch: error: Batch"):
        batch.submit(Path("job.sh"), ["sbatch", "job.sh"], 60)


def test_submitit_without_slurm_is_a_batch_system_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    call = FunctionCall(print, "x", tmp_path / "calls", "name", SITE, SITE.queues[0], 1, 60)
    with pytest.raises(BatchSystemError, match="could not submit"):
        SlurmBatch(tmp_path).call(call)


def test_batch_systems_are_chosen_by_the_site(tmp_path):
    assert isinstance(batch_system_of(SITE, tmp_path), SlurmBatch)
    with pytest.raises(BatchSystemError, match="can be rendered, but not submitted") as caught:
        batch_system_of(replace(SITE, batch_system="lsf"), tmp_path)
    assert "hetctl render" in caught.value.hint
