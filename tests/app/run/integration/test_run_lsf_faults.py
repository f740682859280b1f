"""What LSF does to jobs, by the stand-in: every member is trained in the end, each epoch once."""

from __future__ import annotations

import time

import pytest
from one_driver import problems
from workbench import pretending_project, wait_for

from hetctl.catalog.catalog import Catalog
from hetctl.model.job import JobState
from hetctl.storage.progress_fold import events_in

EPOCHS = 6
ENSEMBLE = f"""\
name: trio
framework: tensorflow
functions: {{input_fn: nets:input_fn, model_fn: nets:model_fn}}
stop: {{metric: val_accuracy, mode: max, patience: 50, max_epochs: {EPOCHS}}}
members:
""" + "".join(
    f"  - {{name: {name}, max_gpus: 1, config: {{epochs: {EPOCHS}, epoch_s: 0.5, leave_s: 0}}}}\n"
    for name in "abc"
)
SITE = """\
extends: summit
device: slot
nodes: 2
gpus_per_node: 2
cores_per_node: 2
memory_per_node: 2GB
gpu_type: null
queues: [{name: normal, max_nodes: 2, max_wall: 1h}]
queue: normal
directives: []
timeouts: {lease: 15s}
"""


class Run:
    """A run on one node of a cluster with jsrun; its trainers only pretend, and leave after `leave_s`."""

    def __init__(self, cluster, folder, leave_s=0, epoch_s=0.5) -> None:
        self.cluster = cluster
        self.project = pretending_project(
            folder,
            ENSEMBLE.replace("leave_s: 0", f"leave_s: {leave_s}").replace(
                "epoch_s: 0.5", f"epoch_s: {epoch_s}"
            ),
            environment={**cluster.environment(), "HETCTL_SITE": "lab"},
        )
        (self.project.path / "site-configs").mkdir()
        (self.project.path / "site-configs" / "lab.yaml").write_text(SITE)
        assert self.project.here("profile", "import", "rates.csv").code == 0

    def submit(self, *options, wall="10m") -> str:
        answer = self.project.here("submit", "--gpus", "2", "--time", wall, *options)
        assert answer.code == 0, answer
        return self.jobs()[0].batch_id

    def start(self, *options) -> str:
        """Submit; return the job's id once members are in training."""
        job = self.submit(*options)
        wait_for(lambda: len(self.project.epochs()) >= 2, 60)
        return job

    def next(self, number) -> str:
        """Return the id of a further job once it has trained an epoch."""

        def trained():
            events = events_in(self.project.home.run("trio-001"))
            started = [
                event.time for event in events if event.kind == "job_started" and event.data["job"] == number
            ]
            return any(event.kind == "epoch" and event.time > start for start in started for event in events)

        # Others end a job whose script then leaves the submission of the next one undone.
        wait_for(lambda: self.project.is_over() or trained(), 60)
        return self.jobs()[number].batch_id

    def limit(self, job, seconds) -> None:
        """Have LSF leave a running job so much time."""
        (started,) = (one["started"] for one in self.cluster.ask("jobs") if one["id"] == job)
        self.cluster.ask("limit", job=job, minutes=(time.time() - started + seconds) / 60)

    def reasons(self) -> set[str]:
        """Return why members stopped, wherever they did."""
        events = events_in(self.project.home.run("trio-001"))
        return {event.data["reason"] for event in events if event.kind == "stopped"}

    def jobs(self):
        with Catalog.open(self.project.home.catalog) as catalog:
            return catalog.jobs("trio-001")

    def finish(self):
        wait_for(self.project.is_over, 240)
        assert self.project.epochs() == {name: list(range(1, EPOCHS + 1)) for name in "abc"}
        events = events_in(self.project.home.run("trio-001"))
        assert problems(events, epochs=dict.fromkeys("abc", EPOCHS)) == []
        return [job.state for job in self.jobs()]


@pytest.fixture
def make_run(start_lsf, tmp_path):
    def make(kill_s=3.0, **fields):
        hosts = {"a1": (2, 0), "a2": (2, 0)}
        return Run(start_lsf(hosts=hosts, launch_host="batch1", kill_s=kill_s), tmp_path, **fields)

    return make


@pytest.fixture
def run(make_run):
    return make_run()


def test_jobs_that_others_end_and_one_that_lsf_no_longer_lists(run):
    """LSF starts with an INT, which no step may take for its own.

    `test_batch_lsf_cluster` has its other reasons.
    """
    assert run.cluster.run("bkill", run.start()).returncode == 0
    run.cluster.ask("end", job=run.next(1), reason="TERM_PREEMPT: job killed after preemption")
    run.cluster.ask("hide", job=run.next(2), where="everything")
    assert run.project.here("status", "--json").code == 0
    assert run.finish()[:2] == [JobState.CANCELLED, JobState.PREEMPTED]
    assert run.jobs()[1].reason.startswith("TERM_PREEMPT")


def test_the_warning_ends_a_job_in_time(run):
    """By its own count the script has ten minutes, but it heeds what ``-wa`` sends at ``-wt``."""
    job = run.start()
    run.limit(job, 59)
    first, _ = run.finish()
    assert (first, run.reasons()) == (JobState.FINISHED, {"signal"})


def test_the_limit_of_lsf_ends_a_job(make_run):
    """The script is warned, but has trainers that take too long to leave; the next job waits already."""
    run = make_run(kill_s=0.2, leave_s=60)
    job = run.start("--chain")
    wait_for(lambda: len(run.cluster.ask("jobs")) == 2)
    _, second = run.cluster.ask("jobs")
    assert (second["fields"]["stat"], "dependency" in second["fields"]["pend_reason"]) == ("PEND", True)
    script = run.project.home.run("trio-001").job(1).script.read_text()
    assert f"#BSUB -w 'ended({job})'\n" in script
    run.limit(job, 0.5)
    assert run.finish()[0] is JobState.TIMEOUT
    assert run.jobs()[0].reason.startswith("TERM_RUNLIMIT")
    assert run.reasons() == set()


def test_a_limit_that_was_shortened_in_the_queue(make_run):
    """The script asks what is left: of a minute and a half LSF says a minute, most of which is grace."""
    run = make_run(epoch_s=2)
    for host in ("a1", "a2"):
        run.cluster.ask("host", name=host, open=False)
    job = run.submit(wall="16m")
    run.cluster.ask("limit", job=job, minutes=1.5)
    for host in ("a1", "a2"):
        run.cluster.ask("host", name=host, open=True)
    first, _ = run.finish()
    assert (first, run.reasons()) == (JobState.FINISHED, {"deadline"})
    assert 1 < run.jobs()[0].ended_at - run.jobs()[0].submitted_at < 90
