"""What only a real Slurm does: it is away, forgets, requeues, and loses nodes."""

from __future__ import annotations

import shutil
import signal
import threading
from contextlib import contextmanager

import pytest
from batch_benches import SlurmBench

from hetctl.cluster.batch.base import SubmissionInDoubtError
from hetctl.cluster.batch.command import Answer, CommandRunner
from hetctl.cluster.batch.slurm import SlurmBatch
from hetctl.model.job import JobState

pytestmark = pytest.mark.slurm


@pytest.fixture
def bench(request, tmp_path):
    bench = SlurmBench(request, tmp_path)
    yield bench
    bench.close()


@contextmanager
def controller_away(cluster, seconds):
    """Stop slurmctld in its tracks for so long; yield the timer that lets it go on."""
    controller = cluster._daemons["slurmctld"]
    controller.send_signal(signal.SIGSTOP)
    back = threading.Timer(seconds, controller.send_signal, [signal.SIGCONT])
    back.start()
    try:
        yield back
    finally:
        back.join()


@pytest.fixture
def counted(monkeypatch):
    """The names of the commands that were run."""
    names, run = [], CommandRunner.run

    def counting(runner, argv, *arguments):
        names.append(argv[0])
        return run(runner, argv, *arguments)

    monkeypatch.setattr(CommandRunner, "run", counting)
    return names


def test_a_controller_that_is_away_for_a_while_is_waited_for(bench):
    job = bench.submit("alive", "sleep 600")
    with controller_away(bench.cluster, 15) as back:
        state = bench.status(job).state
        assert back.finished.is_set()
    assert state in {JobState.PENDING, JobState.RUNNING}


def test_a_submission_to_a_silent_controller_is_found_later(bench):
    hasty = SlurmBatch(bench.folder, CommandRunner(timeout_s=3.0))
    request = bench.request("doubt", "sleep 600")
    with controller_away(bench.cluster, 5), pytest.raises(SubmissionInDoubtError):
        hasty.submit(request)
    bench.wait(lambda: bench.batch.find([request.name]))
    bench.jobs.append(bench.batch.find([request.name])[request.name])
    names = bench.cluster.run("squeue", "--noheader", "--states=all", "--format=%j").split()
    assert names.count(request.name) == 1


def test_without_accounting_states_are_those_of_squeue(bench, monkeypatch, counted):
    job = bench.submit("over", "exit 3")
    bench.end_of(job)
    text = bench.cluster.conf.read_text().splitlines()
    kept = [line for line in text if not line.startswith("AccountingStorage")]
    conf = bench.folder / "slurm.conf"
    conf.write_text("\n".join([*kept, "AccountingStorageType=accounting_storage/none", ""]))
    shutil.copy(bench.cluster.conf.with_name("gres.conf"), bench.folder)
    monkeypatch.setenv("SLURM_CONF", str(conf))
    counted.clear()
    states = {name: status.state for name, status in bench.batch.statuses([job, "99999999"]).items()}
    assert states == {job: JobState.FAILED, "99999999": JobState.UNKNOWN}
    names = [bench.named("over"), bench.named("never")]
    assert bench.batch.find(names) == {names[0]: job}
    assert counted == ["squeue", "sacct"] * 2


def test_the_accounting_tells_the_same_when_squeue_has_forgotten(bench, monkeypatch):
    jobs = [
        bench.submit("fine", "exit 0"),
        bench.submit("seven", "exit 7"),
        bench.submit("gone", "sleep 600"),
    ]
    bench.wait(lambda: bench.status(jobs[2]).state is JobState.RUNNING)
    bench.batch.cancel([jobs[2]])
    bench.wait(lambda: all(status.state.over for status in bench.batch.statuses(bench.jobs).values()))
    by_squeue = {job: status.state for job, status in bench.batch.statuses(bench.jobs).items()}
    names = [bench.named("seven"), bench.named("gone")]
    found = bench.batch.find(names)
    run = CommandRunner.run

    def forgetful(runner, argv, *arguments):
        return Answer("", "", 0) if argv[0] == "squeue" else run(runner, argv, *arguments)

    monkeypatch.setattr(CommandRunner, "run", forgetful)
    bench.wait(lambda: {j: s.state for j, s in bench.batch.statuses(bench.jobs).items()} == by_squeue)
    assert list(by_squeue.values()) == [JobState.FINISHED, JobState.FAILED, JobState.CANCELLED]
    assert bench.status(jobs[1]).exit_code == 7
    assert found == {names[0]: jobs[1], names[1]: jobs[2]}
    bench.wait(lambda: bench.batch.find(names) == found)  # names come seconds after states


def test_a_status_is_one_question_however_many_jobs_there_are(bench, counted):
    jobs = [bench.submit(f"job-{index}", "sleep 600") for index in range(5)]
    counted.clear()
    bench.batch.statuses(jobs)
    assert counted == ["squeue"]


def test_a_job_that_is_requeued_from_outside_is_alive_again(bench):
    request = bench.request("requeued", f"echo $SLURM_RESTART_COUNT >>{bench.folder}/runs; sleep 600")
    script = request.script.read_text().replace("--no-requeue", "--requeue")
    request.script.write_text(script)
    job = bench.batch.submit(request)
    bench.jobs.append(job)
    bench.wait((bench.folder / "runs").exists)
    bench.cluster.run("scontrol", "requeue", job)
    bench.wait(lambda: bench.status(job).state is JobState.PENDING)
    assert bench.batch.find([request.name]) == {request.name: job}
    # It starts again when its old credential has expired, after six seconds; sooner, Slurm would end it.
    bench.wait(lambda: bench.status(job).state is JobState.RUNNING)


def test_a_node_that_goes_down_is_named(bench, counted):
    text = "#SBATCH --nodes=2\n#SBATCH --nodelist=n3,n4\nsleep 600"
    job = bench.submit("two-nodes", text)
    bench.wait(lambda: bench.status(job).state is JobState.RUNNING)
    bench.cluster.run("scontrol", "update", "nodename=n4", "state=down", "reason=test")
    try:
        bench.wait(lambda: bench.status(job).state.over)
        counted.clear()
        end = bench.status(job)
        assert counted == ["squeue", "sinfo"]
    finally:
        bench.cluster.run("scontrol", "update", "nodename=n4", "state=resume")
    assert (end.state, end.reason, end.failed_nodes) == (JobState.NODE_FAILED, "NodeDown", ("n4",))


def test_a_job_that_is_held_or_cannot_run_says_why(bench):
    held = bench.submit("held", "#SBATCH --hold\nsleep 600")
    status = bench.status(held)
    assert (status.state, status.reason) == (JobState.PENDING, "JobHeldUser")
