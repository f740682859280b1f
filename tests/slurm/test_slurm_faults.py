"""What a real Slurm does to jobs: in the end every member is trained, each epoch once, the cause is known."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from machine_speed import limit
from one_driver import problems
from slurm_cluster import SlurmCluster
from workbench import driver_of, new_project, python_without_training, ranks_of, wait_for

from hetctl.catalog.catalog import Catalog
from hetctl.model.events import DRIVER
from hetctl.model.job import Job
from hetctl.storage.progress_fold import events_in

pytestmark = pytest.mark.slurm

MEMBERS, EPOCHS = "abcd", 12
ENSEMBLE = f"""\
name: quartet
framework: tensorflow
functions: {{input_fn: nets:input_fn, model_fn: nets:model_fn}}
stop: {{metric: val_accuracy, mode: max, patience: 50, max_epochs: {EPOCHS}}}
members:
""" + "".join(
    f"  - {{name: {name}, max_gpus: 1, config: {{epochs: {EPOCHS}, epoch_s: 0.4}}}}\n" for name in MEMBERS
)
RATES = "member,gpus,rate,samples\n" + "".join(f"{name},1,100,500\n" for name in MEMBERS)
SITE = """\
python: {python}
directives: {directives}
timeouts: {{orphaned: 5s, lease: 10s}}
"""
LATE = """\
import os, sys, time
waits = "hetctl.runtime.agent" in sys.argv and os.environ["SLURM_NODEID"] == "1"
while waits and not os.path.exists({awake!r}):
    time.sleep(0.1)
"""
RUN = "quartet-001"
TRAINED_S = 300


class Run:
    """A run of four members on two nodes, with trainers that only pretend to train."""

    def __init__(self, cluster: SlurmCluster, folder, directives="[]", **environment):
        self.cluster = cluster
        python = python_without_training(folder)
        lab = cluster.lab(folder / "project", SITE.format(python=python, directives=directives))
        self.project = new_project(folder / "project", ENSEMBLE, environment=lab | environment)
        (self.project.path / "rates.csv").write_text(RATES)
        assert self.project.here("profile", "import", "rates.csv").code == 0

    def train_for(self, epoch_s):
        """Let each epoch take so long."""
        text = ENSEMBLE.replace("epoch_s: 0.4", f"epoch_s: {epoch_s}")
        (self.project.path / "ensemble.yaml").write_text(text)
        assert self.project.here("profile", "import", "rates.csv").code == 0

    def submit(self, *options):
        answer = self.project.here("submit", "--gpus", "4", "--time", "10m", *options)
        assert answer.code == 0, answer

    def in_training(self):
        """Wait until every member has finished an epoch; return the job."""
        wait_for(lambda: self.epochs().keys() == set(MEMBERS), seconds=TRAINED_S)
        return self.jobs()[-1].batch_id

    def epochs(self):
        return self.project.epochs(RUN)

    def jobs(self) -> list[Job]:
        with Catalog.open(self.project.home.catalog) as catalog:
            return catalog.jobs(RUN)

    def started(self):
        return [event for event in self.project.driver_events(RUN) if event.kind == "task_started"]

    def ranks_started(self):
        return [event for event in events_in(self.project.home.run(RUN)) if event.kind == "started"]

    def has_begun(self, job):
        """Whether the driver of a job, counted from 0, has begun."""
        events = self.project.driver_events(RUN)
        return any(event.kind == "job_started" and event.data["job"] == job for event in events)

    def ends(self):
        """Why steps ended, by member."""
        ends: dict[str, list[str]] = {}
        for event in self.project.driver_events(RUN):
            if event.kind == "task_ended":
                ends.setdefault(event.data["member"], []).append(event.data["reason"])
        return ends

    def finish(self):
        """Wait for the end: every member has trained every epoch, and none twice."""
        wait_for(self.project.is_over, seconds=TRAINED_S)
        self.check()
        started = [e.data["job"] for e in self.project.driver_events(RUN) if e.kind == "job_started"]
        assert started == sorted(set(started)), "a job ran twice"
        wait_for(lambda: not {"running", "pending"} & {*self.states()}, seconds=TRAINED_S)
        return self.states()

    def check(self):
        """Every member has trained every epoch, once, by one driver at any time."""
        events = events_in(self.project.home.run(RUN))
        assert problems(events, epochs=dict.fromkeys(MEMBERS, EPOCHS)) == []
        assert self.epochs() == {name: list(range(1, EPOCHS + 1)) for name in MEMBERS}

    def states(self):
        """How Slurm says that the jobs ended."""
        return [job["state"] for job in self.project.here("status", "--json").json["jobs"]]


@pytest.fixture
def run(slurm_cluster, tmp_path):
    made = Run(slurm_cluster, tmp_path)
    yield made
    clear(slurm_cluster)


def clear(cluster):
    cluster.run("scancel", "--partition=main")
    # A controller that was away sees only after a minute that a job has completed.
    for state in ("down", "resume"):
        cluster.run("scontrol", "update", "nodename=ALL", f"state={state}", "reason=cleared")
    try:
        wait_for(cluster.all_idle, seconds=60)
    except AssertionError:
        print(cluster.run("sinfo", "--Node", "--long"), cluster.run("squeue"))
        raise


def nodes_of(cluster, job):
    names = cluster.run("squeue", "--noheader", "--format=%N", f"--jobs={job}").strip()
    return cluster.run("scontrol", "show", "hostnames", names).split()


def test_a_killed_rank_costs_its_member_alone_and_killed_steps_and_scripts_are_soon_followed(run, tmp_path):
    """Meanwhile the next job of the chain waits in the queue.

    It starts without waiting for the lease of the driver that was killed with its script: that would outlast
    the test. Members wait for that job.
    """
    site = run.project.path / "site-configs" / "lab.yaml"
    site.write_text(site.read_text().replace("lease: 10s", "lease: 1h"))
    run.train_for(f"0.4, held_after: 2, until: {tmp_path}/gate")
    run.submit("--chain")
    run.in_training()
    job = run.jobs()[0].batch_id
    os.kill(ranks_of(run.project.home.run(RUN).path)[0], signal.SIGKILL)
    wait_for(run.ends)
    assert [*run.ends().values()] == [["killed"]]
    (again,) = run.ends()
    wait_for(lambda: [e.data["member"] for e in run.started()].count(again) == 2)
    steps = run.cluster.run("squeue", "--noheader", "--steps", "--format=%i", f"--jobs={job}").split()
    (agents,) = [step for step in steps if step.rpartition(".")[2].isdigit()]
    run.cluster.run("scancel", "--signal=KILL", agents)

    def train_again():
        starts, ends = [e.data["member"] for e in run.started()], run.ends()
        return all(starts.count(name) > len(ends.get(name, ())) > (name == again) for name in MEMBERS)

    wait_for(train_again)
    # A rank may die, and be started again, before its agent dies.
    killed = {name: ends.count("killed") - (name == again) for name, ends in run.ends().items()}
    assert {*killed.values()} <= {1, 2}
    assert killed.keys() == set(MEMBERS)
    shown = run.cluster.run("scontrol", "show", "job", run.jobs()[1].batch_id)
    assert f"Dependency=afterany:{job}" in shown
    driver = driver_of(run.project.home.run(RUN).path)
    script = driver.parent()
    script.suspend()
    driver.kill()
    script.kill()
    (tmp_path / "gate").touch()
    assert run.finish() == ["failed", "finished", "cancelled"]


def test_an_external_requeue_is_refused_or_continues_the_job(run):
    """An administrator may requeue what hetctl has asked Slurm not to requeue."""
    run.submit()
    job = run.in_training()
    run.cluster.run("scontrol", "update", f"jobid={job}", "requeue=1")
    run.cluster.run("scontrol", "requeue", job)
    wait_for(lambda: "Restarts=1" in run.cluster.run("scontrol", "show", "job", job))
    wait_for(run.project.is_over, seconds=TRAINED_S)
    run.check()


def test_a_lost_job_that_wakes_beside_its_requeued_self_ends(run):
    """All its nodes stand still until it trains again on others, and are cut off from Slurm as they wake."""
    run.train_for(1.0)
    run.submit()
    job = run.in_training()
    run.cluster.run("scontrol", "update", f"jobid={job}", "requeue=1")
    nodes, lost = nodes_of(run.cluster, job), driver_of(run.project.home.run(RUN).path)
    trained = max(map(len, run.epochs().values()))
    try:
        for node in nodes:
            run.cluster.suspend_node(node)
        wait_for(lambda: min(map(len, run.epochs().values())) > trained + 2, TRAINED_S)
        for node in nodes:
            run.cluster.wake_node(node, cut_off=True)
        lost.wait(60)
    finally:
        for node in nodes:
            run.cluster.wake_node(node)
    log = run.project.home.run(RUN).job(0).log.read_text()
    assert "the driver ends at once: the lease could not be renewed in time" in log
    # The old srun may cancel the new step, which has the same number; then another job goes on.
    wait_for(run.project.is_over, seconds=TRAINED_S)
    run.check()


def test_a_node_that_dies_under_the_script_ends_the_job_and_another_takes_its_own_ranks_alone(run):
    """Slurm lets the job of `--no-kill` hold its other nodes: an agent there cancels it."""
    run.train_for(1.0)
    run.submit()
    first, *_ = nodes_of(run.cluster, run.in_training())
    run.cluster.crash_node(first)
    try:
        # A node that dies before its agent has connected counts as lost only after `join`.
        ranks = 2 * len(MEMBERS)
        wait_for(lambda: run.project.is_over() or len(run.ranks_started()) == ranks, seconds=TRAINED_S)
        lost = nodes_of(run.cluster, run.jobs()[-1].batch_id)[-1]
        on_it = {e.data["member"] for e in run.started()[len(MEMBERS) :] if lost in nodes_in(e)}
        run.cluster.crash_node(lost)
        try:
            assert run.finish() == ["cancelled", "finished"]
        finally:
            run.cluster.boot_node(lost)
    finally:
        run.cluster.boot_node(first)
    failed = [e for e in run.project.driver_events(RUN) if e.kind == "node_failed"]
    assert {node for event in failed for node in event.data["nodes"]} == {lost}
    assert {name for name, ends in run.ends().items() if "node-failure" in ends} == on_it
    assert all("killed" not in ends for ends in run.ends().values())
    assert lost not in nodes_in(run.started()[-1])


def test_a_late_agent_gets_members_and_a_job_ends_while_the_controller_is_away(run, tmp_path):
    awake = tmp_path / "awake"
    site = run.project.path / "site-configs" / "lab.yaml"
    site.write_text(site.read_text().replace("orphaned: 5s", f"join: {limit(3)}, orphaned: 5s"))
    (python,) = [Path(line.split()[1]) for line in site.read_text().splitlines() if "python:" in line]
    first, rest = python.read_text().split("\n", 1)
    python.write_text(f"{first}\n{LATE.format(awake=str(awake))}{rest}")
    run.train_for(1.0)
    run.submit()
    wait_for(lambda: any(e.kind == "node_failed" for e in run.project.driver_events(RUN)))
    awake.touch()
    wait_for(lambda: late_starts(run), TRAINED_S)
    run.cluster.stop_controller()
    time.sleep(30)
    run.cluster.start_controller()
    assert run.finish() == ["finished"]
    assert {event.source for event in run.project.driver_events(RUN)} == {DRIVER}


def late_starts(run):
    """The starts of steps on the node that had failed, from then on."""
    events = run.project.driver_events(RUN)
    (failed,) = {node for e in events if e.kind == "node_failed" for node in e.data["nodes"]}
    at = max(number for number, e in enumerate(events) if e.kind == "node_failed")
    return [e for e in events[at:] if e.kind == "task_started" and failed in nodes_in(e)]


def nodes_in(event):
    """The nodes of a step that starts; none of any other event."""
    return {place["node"] for place in event.data.get("placement", ())}


def test_a_preempted_job_makes_way_and_one_at_its_time_limit_is_followed_by_the_next(run, tmp_path):
    """Slurm looks at its clocks every 30 s: the members wait for the third job."""
    run.train_for(f"0.4, held_after: 2, until: {tmp_path}/gate")
    run.submit()
    run.in_training()
    urgent = run.cluster.run(
        *("sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--exclusive", "--time=1"),
        *("--output=/dev/null", "--wrap", "sleep 3"),
    ).strip()
    wait_for(lambda: run.project.is_over() or run.has_begun(1), seconds=TRAINED_S)
    run.cluster.run("scontrol", "update", f"jobid={run.jobs()[1].batch_id}", "EndTime=now+3")
    wait_for(lambda: run.project.is_over() or run.has_begun(2), seconds=TRAINED_S)
    (tmp_path / "gate").touch()
    assert run.finish() == ["preempted", "timeout", "finished"]
    assert run.cluster.run("sacct", "-XPnj", urgent, "--format=State").strip() == "COMPLETED"


def shim(folder, name, lines):
    """Put an executable before the real one on the PATH; ``$REAL`` is that."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\nREAL={shutil.which(name)}\n{lines}\n")
    path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_an_sbatch_that_fails_after_it_has_submitted(slurm_cluster, tmp_path):
    """Each job is found, and the one after a cancelled one submitted once, though accounting is off.

    That one is on a drained node, and the controller is restarted.
    """
    lost = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (receive failure)"
    path = shim(tmp_path / "bin", "sbatch", f'"$REAL" "$@" >/dev/null; echo "{lost}" >&2; exit 1')
    shim(tmp_path / "bin", "sacct", 'echo "Slurm accounting storage is disabled" >&2; exit 1')
    run = Run(slurm_cluster, tmp_path, PATH=path)
    run.submit()
    run.cluster.run("scancel", run.in_training())
    wait_for(lambda: run.project.is_over() or run.has_begun(1), seconds=TRAINED_S)
    node = nodes_of(run.cluster, run.jobs()[1].batch_id)[0]
    run.cluster.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    try:
        run.cluster.stop_controller()
        run.cluster.start_controller()
        assert run.finish() == ["cancelled", "finished"]
    finally:
        run.cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
    jobs = run.jobs()
    names = run.cluster.run("squeue", "--noheader", "--states=all", "--format=%j").split()
    assert [names.count(job.name) for job in jobs] == [1] * len(jobs) == [1, 1]
    clear(slurm_cluster)


def test_a_squeue_that_answers_nothing_and_one_that_calls_a_living_job_over(slurm_cluster, tmp_path):
    """The next job starts beside the living one, and trains when its driver has ended."""
    count, lie = tmp_path / "asked", tmp_path / "lie"
    early = f'[ "$(wc -l <{count})" -gt 3 ] || exit 0'
    over = f'if [ -e {lie} ]; then echo "$(cat {lie})|FAILED|256|None||"; exit 0; fi'
    path = shim(tmp_path / "bin", "squeue", f'echo x >>{count}; {early}; {over}; exec "$REAL" "$@"')
    shim(tmp_path / "bin", "sacct", f'{early}; exec "$REAL" "$@"')
    run = Run(slurm_cluster, tmp_path, PATH=path)
    run.train_for(1.0)
    run.submit()
    for _ in range(3):
        # On a slow machine the job has ended well before the third question.
        assert run.project.here("status", "--json").json["state"] in ("queued", "running", "finished")
        assert run.project.here("advance", "--json").json["state"] in ("queued", "running", "finished")
    lie.write_text(run.in_training())
    answer = run.project.here("advance", "--json")
    lie.unlink()
    assert answer.json["job"]["number"] == 1, answer
    wait_for(run.project.is_over, seconds=TRAINED_S)
    run.check()
    started = [e.data["job"] for e in run.project.driver_events(RUN) if e.kind == "job_started"]
    assert started == [0, 1]
    clear(slurm_cluster)
