"""Two nodes of a real Slurm, with partitions on their disks: members hop between them, and lose no visit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hop_rules import broken_by_visits
from one_driver import problems
from tiny_networks import ENSEMBLES
from visiting_ranks import digest, train_alone
from workbench import ProjectFolder, driver_of, processes_on, ranks_of, wait_for

from hetctl.model.hops import DONE
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.storage.paths import member_folder, tensorboard_file
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import read_spec
from hetctl.storage.visit_fold import FoldLog, VisitFold

pytestmark = [pytest.mark.slurm, pytest.mark.training]
RUN = "hops-001"
OLDEST = "epoch-00000-000000000000-00000-000000000"
"""Name of a checkpoint before all others."""
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
framework: pytorch
functions:
  input_fn: handwriting:staged_input_fn
  model_fn: tiny_torch:model_fn
  train_fn: tiny_torch:fit_train_fn
partitions: {{count: 4, path: '{disks}/$SLURMD_NODENAME/{{partition}}.npz'}}
samples_per_epoch: 640
stop: {{metric: val_loss, patience: 9, max_epochs: {epochs}}}
members:
"""
MEMBER = "  - {{name: m{number}, config: {config}, batch_size: 16, max_gpus: {gpus}, seed: {number}}}\n"
SITE = """\
extends: slurm
nodes: 2
gpus_per_node: 2
cores_per_node: 2
memory_per_node: 24000MiB
queues: [{{name: main, max_nodes: 2, max_wall: 1h}}]
python: {python}
timeouts: {{orphaned: 5s, silence: {silence}, lease: 30s}}
"""


def project_of(
    cluster,
    folder,
    homes,
    epochs,
    pause_s,
    silence="30s",
    configs=CONFIGS,
    max_gpus=1,
    rate=500,
):
    """Make a project.

    Parameters
    ----------
    homes : list of list of str
        Nodes of each partition.
    pause_s : float
        Pause after each step.
    max_gpus : int
        GPUs of each member.
    """
    disks, home = folder / "disks", folder / "project"
    place_partitions(disks, homes)
    (home / "site-configs").mkdir(parents=True)
    for module in ("tiny_torch", "handwriting"):
        shutil.copy(ENSEMBLES / f"{module}.py", home)
    text = ENSEMBLE.format(disks=disks, epochs=epochs)
    members = [
        MEMBER.format(number=number, config=json.dumps({**config, "pause_s": pause_s}), gpus=max_gpus)
        for number, config in enumerate(configs)
    ]
    (home / "ensemble.yaml").write_text(text + "".join(members))
    rates = "".join(
        f"m{number},{gpus},{rate * gpus},{640 * epochs}\n"
        for number in range(len(configs))
        for gpus in range(1, max_gpus + 1)
    )
    (home / "rates.csv").write_text("member,gpus,rate,samples\n" + rates)
    (home / "site-configs" / "lab.yaml").write_text(SITE.format(python=sys.executable, silence=silence))
    project = ProjectFolder(home, environment={**cluster.environment(), "HETCTL_SITE": "lab"})
    assert project.here("profile", "import", "rates.csv").code == 0
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
    answer = project.here("submit", "--mode", "hopper", "--gpus", "4", "--time", "10m", "--json", *options)
    assert answer.code == 0, answer
    return answer.json


def events_of(project):
    return events_in(project.home.run(RUN))


def visits_of(events):
    """Return the visits that count, in the order of their ends."""
    undone = {(e.source, n) for e in events if e.kind == "visits_undone" for n in e.data["numbers"]}
    return [
        {"member": e.source, **e.data}
        for e in events
        if e.kind == "visit" and (e.source, e.data["number"]) not in undone
    ]


def assert_complete(project):
    """Assert that the run obeys the four invariants of CEREBRO, section 2."""
    members = {f"m{number}": 1 for number in range(len(CONFIGS))}
    visits = FoldLog(VisitFold(), project.home.run(RUN), members).refresh().visits
    assert broken_by_visits(visits, 4, members) == []
    assert problems(events_of(project), epochs=members) == []
    assert sum(visit.state == DONE for visit in visits) == len(CONFIGS) * 2 * 4


def assert_equal_to_one_process(project, visits):
    """Assert that the last checkpoints are those of processes that follow the visits of one member each."""
    everywhere = project.path.parent / "all"
    everywhere.mkdir()
    for path in project.path.parent.glob("disks/*/*.npz"):
        shutil.copy(path, everywhere)
    ensemble = read_spec(project.home.run(RUN)).ensemble
    ensemble = replace(
        ensemble, partitions=replace(ensemble.partitions, path=f"{everywhere}/{{partition}}.npz")
    )
    expected = {}
    for member in ensemble.members:
        own = [v for v in visits if v["member"] == member.name]
        order = [(v["epoch"], v["partition"], v["evaluates"], 1) for v in own]
        quick = replace(member, config={**member.config, "pause_s": 0.0})
        expected[member.name], _ = train_alone(everywhere, ensemble, quick, order)
    assert last_states(project, RUN, expected) == expected


def last_states(project, run, names):
    """Return the digests of the members' last checkpoints."""
    folders = {name: member_folder(project.home.checkpoints, run, name) for name in names}
    return {name: digest(CheckpointFolder(folder).load().arrays) for name, folder in folders.items()}


def test_few_members_hop_from_group_to_group(slurm_cluster, tmp_path):
    """Two members on two nodes, with two partitions each; a killed rank costs its group one visit."""
    homes = ["n1", "n1", "n2", "n2"]
    project = project_of(
        slurm_cluster,
        tmp_path,
        [[node] for node in homes],
        epochs=2,
        pause_s=0.1,
        configs=CONFIGS[::3],
        max_gpus=2,
        rate=50,
    )
    submit(project)
    after_visits(project, 2)
    os.kill(rank_at_work(project), signal.SIGKILL)
    wait_for(project.is_over, 180)
    events = events_of(project)
    assert [e.data["reason"] for e in events if e.kind == "visit_lost"] == ["killed"]
    members = {"m0": 2, "m1": 2}
    visits = FoldLog(VisitFold(), project.home.run(RUN), members).refresh().visits
    assert broken_by_visits(visits, 4, members) == []
    workers = {visit["partition"]: visit["worker"] for visit in visits_of(events)}
    assert workers == {number: f"{node}:0+1" for number, node in enumerate(homes)}
    assert any(visit["bytes"] > 0 for visit in visits_of(events))
    folders = [member_folder(project.home.checkpoints, RUN, name) for name in members]
    assert all(tensorboard_file(folder).exists() for folder in folders)
    assert [e.data["gpus"] for e in events if e.kind == "epoch" and e.source == "m0"] == [2, 2]
    # Two gradients add up to the same bits in any order.
    states = last_states(project, RUN, ["m0", "m1"])
    assert project.here("hopper", "trace", "-o", "hops.jsonl").code == 0
    assert submit(project, "--wait", "--new", "--replay", "hops.jsonl")["state"] == "finished"
    assert last_states(project, "hops-002", states) == states


@pytest.fixture
def slow(slurm_cluster, tmp_path):
    """A project of one epoch in training on two nodes of two GPUs, each with all partitions."""
    homes = [["n1", "n2"]] * 4
    project = project_of(slurm_cluster, tmp_path, homes, epochs=1, pause_s=0.6, silence="10s")
    submit(project)
    yield project
    slurm_cluster.run("scancel", "--partition=main")
    wait_for(slurm_cluster.all_idle, seconds=60)


def test_faults_lose_no_visit_and_repeat_none(slow, slurm_cluster):
    """In the middle, a rank is killed, then a node stands still, returns and dies, then the driver.

    Members end as in one process that follows the visits. So they do with either framework, as
    `test_worker_visiting` shows of its ranks.
    """
    after_visits(slow, 2)
    os.kill(rank_at_work(slow), signal.SIGKILL)
    after_visits(slow, 6)
    there = processes_on(slow.home.run(RUN).path, "n2")
    for pid in there:
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: "node lost" in plans_of(slow), 60)
    for pid in there:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: is_used_again(slow, "n2"), 60)
    (job,) = slow.here("status", "--json").json["jobs"]
    assert job["failed_nodes"] == []
    slurm_cluster.crash_node("n2")
    try:
        wait_for(lambda: plans_of(slow).count("node lost") == 2, 60)
    finally:
        slurm_cluster.boot_node("n2")
    unfinished = member_folder(slow.home.checkpoints, RUN, "m0") / f"{OLDEST}.tmp"
    unfinished.write_bytes(b"of a rank that was killed")
    driver_of(slow.home.run(RUN).path).kill()
    wait_for(slow.is_over, 180)
    assert not unfinished.exists()
    events = events_of(slow)
    assert plans_of(slow) == ["start", "node lost", "node joined", "node lost", "start"]
    (_, reason), *others = lost = visits_lost(events)
    assert reason == "killed", lost
    assert "node-failure" in dict(map(reversed, others))
    # Besides a node's own, visits are lost that waited for a state from there.
    assert {(worker[:2], reason) for worker, reason in others} <= {("n2", "node-failure"), ("n1", "told")}
    # Each time on each worker one at most.
    assert max(Counter(worker for worker, _ in others).values()) <= 2
    assert_complete(slow)
    assert_equal_to_one_process(slow, visits_of(events))
    started = [event.data["job"] for event in slow.driver_events(RUN) if event.kind == "job_started"]
    assert started == [0, 1]


def visits_lost(events):
    """Return worker and reason of each visit that was lost."""
    return [(event.data["worker"], event.data["reason"]) for event in events if event.kind == "visit_lost"]


def is_used_again(project, node):
    """Return whether a visit has ended that began there after the node had joined."""
    events = events_of(project)
    joined = [event for event in events if event.kind == "node_joined"]
    assert [event.data for event in joined] in ([], [{"job": 0, "node": node}])
    return joined and any(
        visit["worker"].startswith(node) and visit["began_at"] > joined[0].time for visit in visits_of(events)
    )


def plans_of(project):
    """Return the reasons of all plans but those that replace one that is done."""
    reasons = [event.data["reason"] for event in events_of(project) if event.kind == "hop_plan"]
    return [reason for reason in reasons if reason != "used up"]


def after_visits(project, count):
    wait_for(lambda: len(visits_of(events_of(project))) >= count, 60)


def rank_at_work(project):
    """Return the process of the rank that has begun its visit last."""
    started = [event for event in project.driver_events(RUN) if event.kind == "task_started"][-1]
    (place,) = started.data["placement"]
    return ranks_of(project.home.run(RUN).path, place["node"])[0]
