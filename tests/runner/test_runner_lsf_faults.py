"""What LSF does to jobs, by the stand-in: every member is trained in the end, each epoch once."""

from __future__ import annotations

import pytest
from workbench import new_project, python_without_training, wait_for

from hetctl.catalog.catalog import Catalog
from hetctl.core.job import JobState

EPOCHS = 6
ENSEMBLE = f"""\
name: trio
framework: tensorflow
functions: {{input_fn: nets:input_fn, model_fn: nets:model_fn}}
stop: {{metric: val_accuracy, mode: max, patience: 50, max_epochs: {EPOCHS}}}
members:
""" + "".join(
    f"  - {{name: {name}, max_gpus: 1, config: {{epochs: {EPOCHS}, epoch_s: 0.4}}}}\n" for name in "abc"
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
"""


class Run:
    """A run on one node of a cluster with jsrun, with trainers that only pretend to train."""

    def __init__(self, cluster, folder) -> None:
        self.cluster = cluster
        self.project = new_project(
            folder / "project",
            ENSEMBLE,
            python=python_without_training(folder),
            environment={**cluster.environment(), "HETCTL_SITE": "lab"},
        )
        (self.project.path / "site-configs").mkdir()
        (self.project.path / "site-configs" / "lab.yaml").write_text(SITE)
        assert self.project.hetctl("profile", "import", "rates.csv").code == 0

    def start(self, *options) -> str:
        """Submit; return the job's id once members are in training."""
        answer = self.project.hetctl("submit", "--gpus", "2", "--time", "10m", *options)
        assert answer.code == 0, answer
        wait_for(lambda: len(self.project.epochs()) >= 2, 60)
        return self.jobs()[0].batch_id

    def jobs(self):
        with Catalog.open(self.project.home.catalog) as catalog:
            return catalog.jobs("trio-001")

    def is_over(self) -> bool:
        state = self.project.hetctl("status", "--json").json["state"]
        if state == "between-jobs":
            assert self.project.hetctl("advance").code in (0, 6)
        return state == "finished"

    def finish(self):
        wait_for(self.is_over, 90)
        assert self.project.epochs() == {name: list(range(1, EPOCHS + 1)) for name in "abc"}
        return [job.state for job in self.jobs()]


@pytest.fixture
def run(start_lsf, tmp_path):
    hosts = {"a1": (2, 0), "a2": (2, 0)}
    return Run(start_lsf(hosts=hosts, launch_host="batch1", kill_s=3.0), tmp_path)


def test_a_job_that_is_killed_by_its_owner(run):
    """LSF starts with an INT, which no step may take for its own."""
    job = run.start()
    assert run.cluster.run("bkill", job).returncode == 0
    assert run.finish()[0] is JobState.CANCELLED


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("TERM_PREEMPT: job killed after preemption", JobState.PREEMPTED),
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit", JobState.OUT_OF_MEMORY),
    ],
)
def test_a_job_that_the_site_ends(run, reason, state):
    job = run.start()
    run.cluster.ask("end", job=job, reason=reason)
    assert run.finish()[0] is state
    assert run.jobs()[0].detail.startswith(reason.partition(":")[0])


def test_a_job_that_lsf_forgets_while_it_trains(run):
    job = run.start()
    run.cluster.ask("hide", job=job, where="everything")
    assert run.project.hetctl("status", "--json").code == 0
    run.finish()


def test_the_next_job_waits_behind_the_running_one(run):
    job = run.start("--chain")
    wait_for(lambda: len(run.cluster.ask("jobs")) == 2)
    _, second = run.cluster.ask("jobs")
    assert (second["fields"]["stat"], "dependency" in second["fields"]["pend_reason"]) == ("PEND", True)
    script = run.project.home.run("trio-001").round(run.jobs()[1].first_round).script.read_text()
    assert f"#BSUB -w 'ended({job})'\n" in script
    run.finish()
