"""LSF's own ways, on a cluster of the stand-in."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from workbench import alive, wait_for

from hetctl.cluster.batch.base import JobRequest, SubmissionInDoubtError
from hetctl.cluster.batch.command import CommandRunner
from hetctl.cluster.batch.lsf import LsfBatch
from hetctl.model.errors import BatchSystemError
from hetctl.model.job import JobState
from hetctl.model.site import Queue, Site

HOSTS = {"a1": (4, 2), "a2": (4, 2)}
SITE = Site("s", "lsf", "mpirun", 2, 2, 4, 2**30, (Queue("normal"),))


@pytest.fixture
def cluster(start_lsf):
    return start_lsf(hosts=HOSTS)


@pytest.fixture
def batch(tmp_path):
    return LsfBatch(tmp_path)


@pytest.fixture
def submit(batch, tmp_path):
    """Submit a script with `#BSUB` lines, read by bsub as a file or from its input."""

    def submit_script(text, *directives, stdin=False, name="job", batch=batch):
        script = tmp_path / f"{name}.sh"
        lines = "".join(
            f"#BSUB {line}\n" for line in (f"-J {name}", f"-o {tmp_path}/{name}.log", *directives)
        )
        script.write_text(f"#!/bin/bash\n{lines}{text}\n")
        command = ("bsub",) if stdin else ("bsub", str(script))
        return batch.submit(JobRequest(name, script, command, 60, SITE, 1))

    return submit_script


def end_of(batch, job):
    return wait_for(lambda: (s := batch.statuses([job])[job]).state.over and s)


def state(batch, job):
    return batch.statuses([job])[job].state


def test_a_script_is_read_from_stdin_where_files_are_not_parsed(start_lsf, batch, submit, tmp_path):
    start_lsf(parse_scripts=False)
    job = submit("echo $LSB_JOBNAME", stdin=True)
    assert end_of(batch, job).state is JobState.FINISHED
    assert (tmp_path / "job.log").read_text().startswith("job\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-zz", "true"], "-zz: Illegal option"),
        (["-q", "none", "true"], "none: No such queue"),
        (["-W", "1:2:3", "true"], "Bad RUNLIMIT specification"),
        (["-J", "a[0-3]", "true"], "Bad job name"),
        (["-R", "select[", "true"], "Bad resource requirement syntax"),
        (["-w", "ended(99)", "true"], "ended(99): No matching job found"),
        (["-wa", "USR2", "true"], "must both be specified"),
        (["-nnodes", "1", "true"], "CSM is not enabled"),
    ],
)
def test_a_wrong_option_of_bsub_is_refused_and_submits_nothing(cluster, arguments, words):
    done = cluster.run("bsub", *arguments)
    assert (done.returncode, done.stdout) == (255, "")
    assert words in done.stderr
    assert cluster.ask("jobs") == []


def test_a_queue_has_a_longest_limit(start_lsf):
    cluster = start_lsf(queues={"normal": 60})
    done = cluster.run("bsub", "-W", "1:01", "true")
    assert (done.returncode, "Cannot exceed queue's hard limit" in done.stderr) == (255, True)
    assert cluster.run("bsub", "-W", "1:00", "true").returncode == 0


def test_what_is_left_of_a_job_is_said_in_whole_minutes(cluster, batch, submit):
    job = submit("sleep 600", "-W 2:05")
    wait_for(lambda: state(batch, job) is JobState.RUNNING)
    ask = ("bjobs", "-noheader", "-o", "time_left", job)
    assert cluster.run(*ask).stdout == "2:4 L\n"
    batch.cancel([job])
    end_of(batch, job)
    assert cluster.run(*ask).stdout == "-\n"


def test_hosts_are_given_by_cores_and_gpus_without_excluded_ones(cluster, batch, submit):
    wide = ("-n 4", '-R "span[ptile=4]"', '-gpu "num=2:mode=shared:j_exclusive=yes"')
    first = submit("sleep 600", *wide, "-R \"select[hname!='a1']\"")
    second = submit("sleep 600", *wide, name="second")
    third = submit("sleep 600", *wide, name="third")
    wait_for(lambda: state(batch, second) is JobState.RUNNING)
    fields = {job["id"]: job["fields"] for job in cluster.ask("jobs")}
    assert (fields[first]["exec_host"], fields[second]["exec_host"]) == ("4*a2", "4*a1")
    assert state(batch, third) is JobState.PENDING
    batch.cancel([first])
    wait_for(lambda: state(batch, third) is JobState.RUNNING)


@pytest.mark.usefixtures("cluster")
def test_a_job_learns_its_hosts_and_gpus(batch, submit, tmp_path):
    job = submit(
        f"cat $LSB_DJOB_HOSTFILE >{tmp_path}/hosts; echo $CUDA_VISIBLE_DEVICES >{tmp_path}/gpus",
        "-n 4", '-R "span[ptile=2]"', "-gpu num=2",
    )  # fmt: skip
    assert end_of(batch, job).state is JobState.FINISHED
    assert (tmp_path / "hosts").read_text().split() == ["a1", "a1", "a2", "a2"]
    assert (tmp_path / "gpus").read_text() == "0,1\n"


def test_a_warning_precedes_the_limit_that_ends_the_job(start_lsf, batch, submit, tmp_path):
    start_lsf(minute_s=3.0, kill_s=2.0)
    told = f"{tmp_path}/told"
    script = f"trap 'date +%s.%N >>{told}' USR2; date +%s.%N >{told}; while true; do sleep 0.05 & wait; done"
    job = submit(script, "-W 0:4", "-wa 'USR2'", "-wt 2")
    end = end_of(batch, job)
    assert (end.state, end.exit_code) == (JobState.TIMEOUT, 130)
    assert end.reason.startswith("TERM_RUNLIMIT")
    start, warned, at_limit = map(float, Path(told).read_text().split())
    assert 3.5 < warned - start < 9 < at_limit - start < 16


def test_an_exit_code_may_be_missing(cluster, batch, submit):
    cluster.ask("set", empty_exit_code=True)
    fine, failing = submit("exit 0"), submit("exit 3", name="failing")
    assert (end_of(batch, fine).state, end_of(batch, fine).exit_code) == (JobState.FINISHED, 0)
    assert (end_of(batch, failing).state, end_of(batch, failing).exit_code) == (JobState.FAILED, None)


def test_a_job_lost_by_bjobs_is_known_from_bhist_or_unknown(cluster, batch, submit):
    job = submit("exit 3", name="hetctl-x-1")
    end_of(batch, job)
    cluster.ask("hide", job=job, where="bjobs")
    assert batch.statuses([job])[job].exit_code == 3
    assert batch.find(["hetctl-x-1", "hetctl-y-1"]) == {"hetctl-x-1": job}
    cluster.ask("hide", job=job, where="everything")
    assert state(batch, job) is JobState.UNKNOWN
    assert batch.find(["hetctl-x-1"]) == {}


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit", JobState.OUT_OF_MEMORY),
        ("TERM_PREEMPT: job killed after preemption", JobState.PREEMPTED),
        ("TERM_ADMIN: job killed by root or LSF administrator", JobState.CANCELLED),
    ],
)
def test_why_a_job_was_ended(cluster, batch, submit, reason, wanted):
    job = submit("sleep 600")
    wait_for(lambda: state(batch, job) is JobState.RUNNING)
    cluster.ask("end", job=job, reason=reason)
    end = end_of(batch, job)
    assert (end.state, end.reason) == (wanted, reason)
    cluster.ask("hide", job=job, where="bjobs")
    assert batch.statuses([job])[job].state is wanted


def test_a_job_on_a_silent_host_is_unknown_until_it_answers(cluster, batch, submit, tmp_path):
    job = submit(f"while [ ! -e {tmp_path}/leave ]; do sleep 0.05; done")
    wait_for(lambda: state(batch, job) is JobState.RUNNING)
    cluster.ask("host", name="a1", reachable=False)
    (tmp_path / "leave").touch()
    wait_for(lambda: state(batch, job) is JobState.UNKNOWN)
    cluster.ask("host", name="a1", reachable=True)
    assert end_of(batch, job).state is JobState.FINISHED


def test_a_requeued_job_runs_again(cluster, batch, submit, tmp_path):
    job = submit(f"echo >>{tmp_path}/starts; [ $(wc -l <{tmp_path}/starts) = 2 ] || sleep 600")
    wait_for((tmp_path / "starts").exists)
    assert cluster.run("brequeue", job).returncode == 0
    assert end_of(batch, job).state is JobState.FINISHED


def test_a_submission_is_in_doubt_when_bsub_cannot_reach_lsf(cluster, batch, submit, tmp_path):
    (cluster.folder / "away").touch()
    with pytest.raises(SubmissionInDoubtError):
        submit("true", name="doubt", batch=LsfBatch(tmp_path, CommandRunner(timeout_s=0.5)))
    (cluster.folder / "away").unlink()
    assert batch.find(["doubt"]) == {}


def test_nothing_of_a_job_outlives_it_nor_the_cluster(cluster, batch, submit):
    mark = str(time.time_ns())
    job = submit(f"setsid sleep 600.{mark} & sleep 0.3")
    assert end_of(batch, job).state is JobState.FINISHED
    wait_for(lambda: not alive(f"600.{mark}"))
    submit(f"setsid sleep 601.{mark} & sleep 600")
    wait_for(lambda: alive(f"601.{mark}"))
    cluster.stop()
    wait_for(lambda: not alive(f"601.{mark}"))
    with pytest.raises(BatchSystemError, match="Connection refused"):
        CommandRunner().check_output(["bjobs"])
