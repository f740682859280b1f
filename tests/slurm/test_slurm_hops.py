"""Four nodes of a real Slurm, each with a partition that no other node has: members hop between them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from hop_reference import digest_of
from tiny_networks import ENSEMBLES, MODULES
from workbench import ProjectFolder, ranks_of, wait_for

from hetctl.model.run_visit import DONE
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.storage.paths import board_in, member_folder
from hetctl.storage.progress_fold import events_in
from hetctl.storage.visit_fold import VisitLog, violations

pytestmark = [pytest.mark.slurm, pytest.mark.training]
RUN = "hops-001"
NODES, EPOCHS = ("n1", "n2", "n3", "n4"), 3
TESTS = Path(__file__).parents[1]
CONFIGS = [
    {"units": units, **how}
    for units in (16, 24, 32)
    for how in (
        {"optimizer": "momentum", "learning_rate": 0.05, "decay": True},
        {"optimizer": "adam", "dropout": 0.3},
    )
]
ENSEMBLE = """\
name: hops
framework: {framework}
functions:
  input_fn: handwriting:staged_input_fn
  model_fn: {module}:model_fn
  train_fn: {module}:fit_train_fn
partitions: {{count: 4, path: '{disks}/$SLURMD_NODENAME/{{partition}}.npz'}}
samples_per_epoch: 640
stop: {{metric: val_loss, patience: 9, max_epochs: {epochs}}}
members:
"""
MEMBER = "  - {{name: m{number}, config: {config}, batch_size: 16, max_gpus: 1, seed: {number}}}\n"
SITE = """\
extends: slurm
nodes: 4
gpus_per_node: 1
cores_per_node: 1
memory_per_node: 6000MiB
queues: [{{name: main, max_nodes: 4, max_wall: 1h}}]
python: {python}
timeouts: {{orphaned: 5s}}
"""


def project_of(framework, cluster, folder, homes=None, epochs=EPOCHS, pause_s=0.0):
    """Make a project.

    Parameters
    ----------
    homes : list of list of str
        Nodes of each partition, by default one each.
    pause_s : float
        Pause after each step.
    """
    disks, home = folder / "disks", folder / "project"
    place_partitions(disks, homes or [[node] for node in NODES])
    (home / "site-configs").mkdir(parents=True)
    for module in (*MODULES.values(), "handwriting"):
        shutil.copy(ENSEMBLES / f"{module}.py", home)
    text = ENSEMBLE.format(framework=framework, module=MODULES[framework], disks=disks, epochs=epochs)
    configs = [json.dumps({**config, "pause_s": pause_s}) for config in CONFIGS]
    members = [MEMBER.format(number=number, config=config) for number, config in enumerate(configs)]
    (home / "ensemble.yaml").write_text(text + "".join(members))
    rates = "".join(f"m{number},1,500,{640 * epochs}\n" for number in range(len(CONFIGS)))
    (home / "rates.csv").write_text("member,gpus,rate,samples\n" + rates)
    (home / "site-configs" / "lab.yaml").write_text(SITE.format(python=sys.executable))
    project = ProjectFolder(home, environment={**cluster.environment(), "HETCTL_SITE": "lab"})
    assert project.hetctl("profile", "import", "rates.csv").code == 0
    return project


def place_partitions(disks, homes):
    """Write partitions of different sizes, each on its nodes alone."""
    rng = np.random.default_rng(0)
    x, y = rng.random((800, 8, 8, 1), dtype=np.float32), rng.integers(0, 10, 800)
    starts = (0, 160, 304, 480, 640)
    for number, nodes in enumerate(homes):
        own = slice(starts[number], starts[number + 1])
        held_out = slice(640 + 40 * number, 680 + 40 * number)
        for node in nodes:
            (disks / node).mkdir(parents=True, exist_ok=True)
            arrays = {"x": x[own], "y": y[own], "x_validation": x[held_out], "y_validation": y[held_out]}
            np.savez(disks / node / f"{number}.npz", **arrays)


def submit(project, *options):
    answer = project.hetctl("submit", "--mode", "hopper", "--gpus", "4", "--time", "10m", "--json", *options)
    assert answer.code == 0, answer
    return answer.json


def events_of(project):
    return events_in(project.home.run(RUN))


def is_over(project):
    """Do as ``hetctl submit --wait`` does: submit the next job where nobody else has."""
    state = project.here("status", "--json").json["state"]
    if state == "between-jobs":
        assert project.here("advance").code in (0, 6)
    assert state in ("queued", "running", "between-jobs", "finished")
    return state == "finished"


def visits_of(events):
    """Return the visits that count, in the order of their ends."""
    undone = {(e.source, n) for e in events if e.kind == "visits_undone" for n in e.data["numbers"]}
    return [
        {"member": e.source, **e.data}
        for e in events
        if e.kind == "visit" and (e.source, e.data["number"]) not in undone
    ]


def assert_complete(project, epochs=EPOCHS):
    """Assert that the run obeys the four invariants of CEREBRO, section 2."""
    members = {f"m{number}": epochs for number in range(len(CONFIGS))}
    visits = VisitLog(project.home.run(RUN), members).look().visits
    assert violations(visits, 4, members) == []
    assert sum(visit.state == DONE for visit in visits) == len(CONFIGS) * epochs * 2 * 4


def assert_equal_to_one_process(project, visits):
    """Return the digests of the last checkpoints: those of one process that follows the visits."""
    everywhere, log = project.path.parent / "all", project.path / "visits.json"
    everywhere.mkdir()
    for path in project.path.parent.glob("disks/*/*.npz"):
        shutil.copy(path, everywhere)
    log.write_text(json.dumps([[v["member"], v["epoch"], v["partition"], v["evaluates"]] for v in visits]))
    specification = project.home.run(RUN).path / "run.json"
    arguments = (str(specification), str(log), str(everywhere / "{partition}.npz"), "1")
    path = f"{TESTS}:{project.path}:{TESTS.parent}"
    done = subprocess.run(
        [sys.executable, "-m", "hop_reference", *arguments],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    expected = json.loads(done.stdout.splitlines()[-1])
    assert last_states(project, RUN, expected) == expected
    return expected


def last_states(project, run, names):
    """Return the digests of the members' last checkpoints."""
    folders = {name: member_folder(project.home.checkpoints, run, name) for name in names}
    return {name: digest_of(CheckpointFolder(folder).load().arrays) for name, folder in folders.items()}


@pytest.mark.parametrize("framework", MODULES)
def test_hops_equal_one_process_that_follows_the_log(slurm_cluster, tmp_path, framework):
    project = project_of(framework, slurm_cluster, tmp_path)
    assert submit(project, "--wait")["state"] == "finished"
    visits = visits_of(events_of(project))
    assert_complete(project)
    homes = {visit["partition"]: visit["worker"] for visit in visits}
    assert homes == {number: f"{node}:0" for number, node in enumerate(NODES)}
    assert sum(visit["bytes"] > 0 for visit in visits) > len(visits) / 2
    digests = assert_equal_to_one_process(project, visits)
    assert all(board_in(member_folder(project.home.checkpoints, RUN, name)).exists() for name in digests)
    if framework == "pytorch":  # With TensorFlow this takes three times as long.
        assert project.hetctl("hopper", "trace", "-o", "hops.jsonl").code == 0
        assert submit(project, "--wait", "--new", "--replay", "hops.jsonl")["state"] == "finished"
        assert last_states(project, "hops-002", digests) == digests


@pytest.fixture
def slow(slurm_cluster, tmp_path):
    """A project of one epoch in training, whose partitions are on two nodes each."""
    homes = [[node, NODES[(number + 1) % 4]] for number, node in enumerate(NODES)]
    project = project_of("pytorch", slurm_cluster, tmp_path, homes, epochs=1, pause_s=0.1)
    submit(project)
    yield project
    slurm_cluster.run("scancel", "--partition=main")
    wait_for(slurm_cluster.all_idle, seconds=60)


def test_faults_lose_no_visit_and_repeat_none(slow, slurm_cluster):
    """A rank, then a node whose partitions others have, then the driver: each is killed in the middle."""
    after_visits(slow, 4)
    os.kill(rank_at_work(slow), signal.SIGKILL)
    after_visits(slow, 9)
    slurm_cluster.crash_node("n4")
    try:
        after_visits(slow, 14)
    finally:
        slurm_cluster.boot_node("n4")
    os.kill(driver_of(slow), signal.SIGKILL)
    wait_for(lambda: is_over(slow), 180)
    events = events_of(slow)
    lost = [(event.data["worker"], event.data["reason"]) for event in events if event.kind == "visit_lost"]
    assert [reason for _, reason in lost] == ["killed", "node-failure"]
    assert lost[1][0] == "n4:0"
    visits = visits_of(events)
    assert_complete(slow, epochs=1)
    assert_equal_to_one_process(slow, visits)
    plans = [event.data["reason"] for event in events if event.kind == "hop_plan"]
    assert [reason for reason in plans if reason != "used up"] == ["start", "node lost", "start"]
    started = [event.data["job"] for event in slow.driver_events(RUN) if event.kind == "job_started"]
    assert started == [0, 1]


def after_visits(project, count):
    wait_for(lambda: len(visits_of(events_of(project))) >= count, 60)


def rank_at_work(project):
    """Return the process of the rank that has begun its visit last."""
    started = [event for event in project.driver_events(RUN) if event.kind == "step_started"][-1]
    (place,) = started.data["placement"]
    return ranks_of(project.home.run(RUN).path, place["node"])[0]


def driver_of(project):
    """Return the process of the driver, which is no child of this one."""
    folder = str(project.home.run(RUN).path)
    (found,) = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "hetctl.runtime.driver" in (process.info["cmdline"] or ()) and folder in process.info["cmdline"]
    ]
    return found
