"""What Slurm prints, as it was captured, and what becomes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetctl.cluster.batch import batch_system_of
from hetctl.cluster.batch.base import JobRequest, SubmissionInDoubtError
from hetctl.cluster.batch.command import Answer, CommandRunner, NoAnswerError
from hetctl.cluster.batch.slurm import (
    STATES,
    SlurmBatch,
    find_command,
    find_gone_command,
    parse_failed_nodes,
    parse_found,
    parse_sacct,
    parse_squeue,
    sacct_command,
    sinfo_command,
    squeue_command,
)
from hetctl.model.errors import BatchSystemError
from hetctl.model.job import JobState, JobStatus
from hetctl.model.site import Queue, Site

SITE = Site("s", "slurm", "srun", 4, 2, 8, 2**30, (Queue("q"),))
CAPTURED = Path(__file__).parent / "captured"
SCRIPT = CAPTURED / "README.md"
"""A file that is there; nothing runs it."""
GONE = Answer("", "slurm_load_jobs error: Invalid job id specified\n", 1)
AWAY = Answer("", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", 1)
DISABLED = Answer("", "Slurm accounting storage is disabled\n", 1)
NO_DATABASE = Answer("", "sacct: error: Problem talking to the database: Connection refused\n", 1)


def captured(name):
    return (CAPTURED / name).read_text()


def states_in(records):
    return {job: record.status.state for job, record in records.items()}


def status(state, code=None, reason="", *nodes):
    return JobStatus(state, code, reason, nodes)


@pytest.mark.parametrize("version", ["20.11", "22.05", "24.11"])
@pytest.mark.parametrize(("command", "parse"), [("squeue", parse_squeue), ("sacct", parse_sacct)])
def test_what_slurm_printed_is_read(version, command, parse):
    """Files in `states` have job, state, exit code and reason, and the nodes of jobs that lost one."""
    name = f"slurm-{version}-{command}.txt"
    lines = (CAPTURED.parent / "states" / name).read_text().splitlines()
    found = []
    for job, record in parse(captured(name)).items():
        known, nodes = record.status, record.nodes if record.status.state is JobState.NODE_FAILED else ""
        code = "" if known.exit_code is None else known.exit_code
        found.append(f"{job}|{known.state.name}|{code}|{known.reason}|{nodes}")
    assert found == [line.partition("  #")[0] for line in lines if not line.startswith("#")]


def test_sacct_of_21_08():
    records = parse_sacct(captured("slurm-21.08-sacct.documented.txt"))
    assert states_in(records) == {
        "51": JobState.OUT_OF_MEMORY,
        "52": JobState.NODE_FAILED,
        "53": JobState.TIMEOUT,
        "54": JobState.CANCELLED,
        "55": JobState.PENDING,
        "56": JobState.NODE_FAILED,
        "57": JobState.TIMEOUT,
    }


def test_squeue_of_23_11():
    records = parse_squeue(captured("slurm-23.11-squeue.documented.txt"))
    assert records["61"].status == status(JobState.FAILED, 137, "RaisedSignal:9(Killed)")
    assert records["62"].status.reason == "ReqNodeNotAvail, UnavailableNodes:n[2-3]"
    assert [records[str(job)].status.state for job in range(63, 69)] == (
        [JobState.PENDING] * 2 + [JobState.RUNNING] * 3 + [JobState.NODE_FAILED]
    )


def test_sacct_of_24_05():
    assert states_in(parse_sacct(captured("slurm-24.05-sacct.documented.txt"))) == {
        "71": JobState.FAILED,
        "72": JobState.FINISHED,
        "73": JobState.CANCELLED,
        "74": JobState.UNKNOWN,
        "75": JobState.PREEMPTED,
    }


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("OUT_OF_ME+", JobState.OUT_OF_MEMORY),
        ("PENDI+", JobState.PENDING),
        ("COMPLET+", JobState.UNKNOWN),
        ("COMPLETE+", JobState.FINISHED),
        ("COMP", JobState.UNKNOWN),
        ("completed", JobState.UNKNOWN),
        ("+", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
        ("HIBERNATING", JobState.UNKNOWN),
    ],
)
def test_cut_and_unknown_states(words, state):
    assert states_in(parse_sacct(f"1|{words}|0:0|n1")) == {"1": state}


@pytest.mark.parametrize(
    "line",
    ["", "slurm_load_jobs error: Invalid job id", "1", "1|COMPLETED", "1|COMPLETED|0:0",
     "JobID|State|ExitCode|NodeList", "1.batch|COMPLETED|0:0|n1", "1|COMPLETED|0:0|n1|more",
     "x1|COMPLETED|0:0|n1", "\u0661|COMPLETED|0:0|n1"],
)  # fmt: skip
def test_what_is_no_whole_record_says_nothing(line):
    assert parse_sacct(line) == parse_squeue(line) == {}


def test_each_state_of_slurm_is_read_as_itself():
    for name, state in STATES.items():
        assert states_in(parse_sacct(f"1|{name}|0:0|n1")) == {"1": state}
        assert states_in(parse_squeue(f"1|{name}|0|None|n1|")) == {"1": state}
    assert [name for name, state in STATES.items() if state is JobState.FINISHED] == ["COMPLETED"]


@pytest.mark.parametrize(
    ("printed", "code"),
    [("7:0", 7), ("0:9", 137), ("1:15", 143), ("1792", 7), ("15", 143), ("36608", 143), ("", None),
     ("4294967294", None), ("-1", None), ("7:", None), ("nonsense", None)],
)  # fmt: skip
def test_exit_codes_of_sacct_are_those_of_a_shell(printed, code):
    assert parse_sacct(f"1|FAILED|{printed}|n1")["1"].status.exit_code == code


@pytest.mark.parametrize("printed", ["-1", "256", "9", "1:0", "0:9", ""])
def test_no_job_is_finished_with_another_exit_code_than_0(printed):
    assert parse_squeue(f"1|COMPLETED|{printed}|None|n1|")["1"].status.state is JobState.FAILED


@pytest.mark.parametrize("printed", ["0", "15", "0:1", "1:0"])
def test_the_exit_code_of_a_dead_node_is_not_the_jobs(printed):
    assert parse_squeue(f"1|NODE_FAIL|{printed}|NodeDown|n1|")["1"].status.exit_code is None


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("4711\n", "4711"),
        ("4711;alpha\n", "4711"),
        ("sbatch: warning: can't run 1 processes on 2 nodes\n4711", "4711"),
    ],
)
def test_the_job_id_that_sbatch_prints(text, job):
    assert SlurmBatch(Path()).parse_job_id(text) == job


@pytest.mark.parametrize("text", ["", "\n", "Submitted batch job 4711", "-1", ";alpha", "4711a"])
def test_a_submission_without_a_job_id_is_in_doubt(text):
    with pytest.raises(SubmissionInDoubtError, match="no job id"):
        SlurmBatch(Path()).parse_job_id(text)


def test_names_of_22_05():
    assert parse_found(captured("slurm-22.05-squeue-names.txt")) == {
        "hetctl-dep": "21",
        "hetctl-long-name-0123456789-0123456789-abcdef": "16",
    }
    assert parse_found(captured("slurm-22.05-sacct-names.txt")) == {"hetctl-nf": "17"}


def test_a_job_that_slurm_refused_is_not_found_by_its_name():
    text = (
        "1|a|FAILED|\n2|b|FAILED|None assigned\n3|c|FAILED|n1\n4|d|PENDING|\n5|e|CANCELLED|\n6|a|RUNNING|n1\n"
    )
    assert parse_found(text) == {"a": "6", "c": "3", "d": "4", "e": "5"}


def test_nodes_that_do_not_work():
    assert parse_failed_nodes(captured("slurm-22.05-sinfo.txt")) == ("n4",)
    assert parse_failed_nodes(captured("slurm-20.11-sinfo.txt")) == ("n2", "n4")
    assert parse_failed_nodes(captured("slurm-24.11-sinfo.txt")) == ("n2", "n4")
    text = "n1|idle\nn2|down*\nn2|down*\nn3|mixed*\nn4|draining\nn5|allocated\nn6|unknown\nn7|\n"
    assert parse_failed_nodes(text) == ("n2", "n3", "n4", "n6")


def test_commands_query_all_jobs_at_once():
    assert squeue_command(["1", "2"])[-1] == sacct_command(["1", "2"])[-1] == "--jobs=1,2"
    assert "--states=all" in squeue_command(["1"])
    assert find_command(["a", "b"], 1000)[-1] == find_gone_command(["a", "b"], 1000)[-1] == "--name=a,b"
    assert "--user=1000" in find_command(["a"], 1000)
    assert sinfo_command("n[1-3]")[-1] == "--nodes=n[1-3]"


class FakeSlurm(CommandRunner):
    """Answers by the first word of the command, with one answer after the other; the last one stays."""

    def __init__(self, **answers):
        super().__init__(pauses_s=(0.0, 0.0))
        prepared = {name: [a] if isinstance(a, Answer) else list(a) for name, a in answers.items()}
        vars(self).update(answers=prepared, asked=[], read=[])

    def run(self, argv, stdin=None):
        self.asked.append(list(argv))
        self.read.append(stdin)
        answers = self.answers[argv[0]]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def names(self):
        return [argv[0] for argv in self.asked]


@pytest.fixture
def slurm():
    def with_answers(**answers):
        fake = FakeSlurm(**answers)
        return SlurmBatch(Path("unused"), fake), fake

    return with_answers


def states_of(batch, *ids):
    return {job: found.state for job, found in batch.statuses(ids).items()}


def request_for(*command):
    return JobRequest("hetctl-r-0-abcdef", SCRIPT, command, 60, SITE, 1)


def test_jobs_forgotten_by_squeue_are_looked_up_in_accounting(slurm):
    batch, fake = slurm(
        squeue=Answer("1|RUNNING|0|None|n1|\n", "", 0), sacct=Answer("2|COMPLETED|0:0|n1\n", "", 0)
    )
    assert states_of(batch, "1", "2", "3") == {
        "1": JobState.RUNNING,
        "2": JobState.FINISHED,
        "3": JobState.UNKNOWN,
    }
    assert fake.names == ["squeue", "sacct"]
    assert fake.asked[1][-1] == "--jobs=2,3"


def test_a_thousand_jobs_are_one_question(slurm):
    lines = "".join(f"{job}|PENDING|0|Priority||\n" for job in range(1000))
    batch, fake = slurm(squeue=Answer(lines, "", 0))
    assert set(states_of(batch, *map(str, range(1000))).values()) == {JobState.PENDING}
    assert fake.names == ["squeue"]


@pytest.mark.parametrize(
    "sacct", [Answer("", "", 0), DISABLED, NO_DATABASE, BatchSystemError("no sacct here")]
)
def test_a_job_without_any_trace_is_unknown_never_finished(slurm, sacct):
    batch, _ = slurm(squeue=GONE, sacct=[sacct])
    assert states_of(batch, "1") == {"1": JobState.UNKNOWN}


def test_the_nodes_that_failed_are_asked_for_only_when_one_has(slurm):
    batch, fake = slurm(
        squeue=Answer("1|NODE_FAIL|15|NodeDown|n[1-3]|\n", "", 0), sinfo=Answer("n1|idle\nn3|down*\n", "", 0)
    )
    assert batch.statuses(["1"]) == {"1": status(JobState.NODE_FAILED, None, "NodeDown", "n3")}
    assert fake.asked[1] == sinfo_command("n[1-3]")


def test_a_controller_that_is_away_for_a_while_is_asked_again(slurm):
    batch, fake = slurm(squeue=[AWAY, NoAnswerError("late"), Answer("1|RUNNING|0|None|n1|", "", 0)])
    assert states_of(batch, "1") == {"1": JobState.RUNNING}
    assert fake.names == ["squeue"] * 3


def test_a_controller_that_stays_away_is_an_error(slurm):
    batch, fake = slurm(squeue=AWAY)
    with pytest.raises(BatchSystemError, match="Unable to contact slurm controller"):
        batch.statuses(["1"])
    assert fake.names == ["squeue"] * 3


def test_nobody_is_asked_again_about_a_trouble_that_stays(slurm):
    batch, fake = slurm(squeue=Answer("", "squeue: error: Invalid user: nobody", 1))
    with pytest.raises(BatchSystemError, match="Invalid user"):
        batch.statuses(["1"])
    assert fake.names == ["squeue"]


def test_names_forgotten_by_squeue_are_looked_up_in_accounting(slurm):
    batch, fake = slurm(squeue=Answer("7|a\n", "", 0), sacct=Answer("5|b\n6|ab\n", "", 0))
    assert batch.find(["a", "b", "c"]) == {"a": "7", "b": "5"}
    assert fake.asked[1][-1] == "--name=b,c"
    assert slurm(squeue=Answer("", "", 0), sacct=DISABLED)[0].find(["a"]) == {}


def test_what_the_accounting_does_not_say_is_not_taken_for_no(slurm):
    """A job that is not found is submitted again: that must not come of a database that is away."""
    batch, _ = slurm(squeue=Answer("", "", 0), sacct=NO_DATABASE)
    with pytest.raises(BatchSystemError, match="Connection refused"):
        batch.find(["a"])


def test_nothing_is_asked_about_no_jobs(slurm):
    batch, fake = slurm()
    assert (batch.statuses([]), batch.find([])) == ({}, {})
    batch.cancel([])
    assert fake.asked == []


def test_sbatch_gets_the_script_on_stdin_if_it_is_not_named(slurm):
    batch, fake = slurm(sbatch=Answer("12;alpha\n", "", 0))
    assert batch.submit(request_for("sbatch", "--parsable")) == "12"
    batch.submit(request_for("sbatch", "--parsable", str(SCRIPT)))
    assert fake.read == [SCRIPT, None]


def test_sbatch_that_refuses_is_quoted(slurm):
    words = "sbatch: error: invalid partition specified: q\nsbatch: error: Batch job submission failed\n"
    batch, _ = slurm(sbatch=Answer("", words, 1))
    with pytest.raises(
        BatchSystemError, match="invalid partition specified: q / sbatch: error: Batch"
    ) as error:
        batch.submit(request_for("sbatch"))
    assert not isinstance(error.value, SubmissionInDoubtError)


@pytest.mark.parametrize(
    "answer",
    [
        *(
            Answer("", f"sbatch: error: Batch job submission failed: {words}\n", 1)
            for words in (
                "Socket timed out on send/recv operation",
                "Unable to contact slurm controller (receive failure)",
                "Unable to contact slurm controller (send failure)",
                "Zero Bytes were transmitted or received",
                "Connection reset by peer",
                "Unexpected message received",
                "Words of a release to come",
            )
        ),
        Answer("", "", -9),
        Answer("something else\n", "", 0),
        NoAnswerError("sbatch did not answer in 60 s"),
    ],
)
def test_a_submission_is_never_repeated_and_may_be_in_doubt(slurm, answer):
    batch, fake = slurm(sbatch=[answer])
    with pytest.raises(SubmissionInDoubtError) as error:
        batch.submit(request_for("sbatch"))
    assert "looks whether the job is there" in error.value.hint
    assert fake.names == ["sbatch"]


def test_a_controller_that_is_away_has_not_taken_the_job(slurm):
    batch, fake = slurm(
        sbatch=replace(AWAY, stderr="sbatch: error: Batch job submission failed: " + AWAY.stderr)
    )
    with pytest.raises(BatchSystemError) as error:
        batch.submit(request_for("sbatch"))
    assert not isinstance(error.value, SubmissionInDoubtError)
    assert fake.names == ["sbatch"]


def test_cancelling_ended_jobs_is_no_error_but_a_refusal_is(slurm):
    over = "scancel: error: Kill job error on job id 1: Job/step already completing or completed"
    batch, fake = slurm(scancel=Answer("", over, 1))
    batch.cancel(["1", "2"])
    assert fake.asked == [["scancel", "1", "2"]]
    batch, _ = slurm(
        scancel=Answer("", "scancel: error: Kill job error on job id 1: Access/permission denied", 1)
    )
    with pytest.raises(BatchSystemError, match="denied"):
        batch.cancel(["1"])


def test_batch_systems_are_chosen_by_the_site(tmp_path):
    assert isinstance(batch_system_of(SITE, tmp_path), SlurmBatch)


def submitted_by_submitit(folder, script, monkeypatch, *words):
    """Submit by an sbatch that is this script."""
    (folder / "sbatch").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    (folder / "job.sh").write_text("#!/bin/sh\n")
    request = replace(request_for("sbatch", *words), script=folder / "job.sh", submitit=folder / "submitit")
    return SlurmBatch(folder).submit(request)


@pytest.mark.parametrize("words", [(), ("--parsable", "{}/job.sh")])
def test_submitit_runs_sbatch_and_keeps_the_script(tmp_path, monkeypatch, words):
    monkeypatch.setenv("SBATCH_JOB_NAME", "mine")
    script = f'echo "$SBATCH_JOB_NAME" "$@" >{tmp_path}/said; cat >{tmp_path}/read; echo 12'
    job = submitted_by_submitit(tmp_path, script, monkeypatch, *(w.format(tmp_path) for w in words))
    assert job == "12"
    assert (tmp_path / "said").read_text().split() == [w.format(tmp_path) for w in words]
    assert (tmp_path / "read").read_text() == ("" if words else "#!/bin/sh\n")
    (kept,) = (tmp_path / "submitit").glob("12_submission.sh")
    assert (kept.read_text(), kept.stat().st_mode & 0o077) == ("#!/bin/sh\n", 0)


@pytest.mark.parametrize(
    ("script", "in_doubt"),
    [
        ("echo sbatch: error: invalid partition specified >&2; exit 1", False),
        ("echo sbatch: error: Socket timed out on send/recv operation >&2; exit 1", True),
        ("echo sbatch: error: what no table has >&2; exit 1", True),
        ("kill -KILL $$", True),
        ("echo nonsense", True),
    ],
)
def test_submitit_is_in_doubt_unless_sbatch_refused(tmp_path, monkeypatch, script, in_doubt):
    with pytest.raises(BatchSystemError) as failed:
        submitted_by_submitit(tmp_path, script, monkeypatch)
    assert isinstance(failed.value, SubmissionInDoubtError) == in_doubt


def test_submitit_without_sbatch_is_a_batch_system_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BatchSystemError, match="sbatch is not on the PATH"):
        SlurmBatch(tmp_path).submit(replace(request_for("sbatch"), submitit=tmp_path / "submitit"))


LOGGING_PROGRAM = """
import logging, sys
from dataclasses import replace
from pathlib import Path
from test_batch_slurm import SlurmBatch, request_for

class Noting(logging.Handler):
    closed = False
    def close(self):
        self.closed = True

handler = Noting()
folder = Path(sys.argv[1])
(folder / "job.sh").write_text("#!/bin/sh")
try:
    request = replace(request_for("sbatch"), script=folder / "job.sh", submitit=folder / "submitit")
    SlurmBatch(folder).submit(request)
except Exception as error:
    print(type(error).__name__, "submitit" in sys.modules, handler.closed)
"""


def test_submitit_leaves_the_logging_of_the_program_around_alone(tmp_path):
    """Its import configured logging, which closed all handlers: pytest's, or those of a notebook."""
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", LOGGING_PROGRAM, str(tmp_path)],
        env={**os.environ, "PATH": str(tmp_path), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["BatchSystemError", "True", "False"], done.stderr
