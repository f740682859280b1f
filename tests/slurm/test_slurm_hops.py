"""Four nodes of a real Slurm, each with a partition that no other node has: members hop between them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hop_reference import digest_of
from tiny_networks import ENSEMBLES, MODULES
from workbench import ProjectFolder

from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.storage.paths import member_folder
from hetctl.storage.progress_fold import events_in

pytestmark = [pytest.mark.slurm, pytest.mark.training]
NODES, EPOCHS = ("n1", "n2", "n3", "n4"), 3
TESTS = Path(__file__).parents[1]
CONFIGS = [
    {"units": units, **how}
    for units in (16, 24, 32)
    for how in (
        {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.05, "decay": True},
        {"optimizer": "adam", "dropout": 0.3},
    )
]
ENSEMBLE = """\
name: hops
framework: {framework}
functions: {{input_fn: handwriting:staged_input_fn, model_fn: {module}:model_fn}}
partitions: {{count: 4, path: '{disks}/$SLURMD_NODENAME/{{partition}}.npz'}}
samples_per_epoch: 640
stop: {{metric: val_loss, patience: 9, max_epochs: {epochs}}}
members:
"""
MEMBER = "  - {{name: m{number}, config: {config}, batch_size: 16, max_gpus: 1, seed: {number}}}\n"
SITE = """\
extends: slurm
nodes: 4
gpus_per_node: {gpus}
cores_per_node: {gpus}
memory_per_node: 6000MiB
queues: [{{name: main, max_nodes: 4, max_wall: 1h}}]
python: {python}
"""


@pytest.fixture(params=MODULES)
def project(request, slurm_cluster, tmp_path):
    """A project with six members."""
    return project_of(request.param, slurm_cluster, tmp_path)


def project_of(framework, cluster, folder, gpus=1, homes=None, epochs=EPOCHS):
    """Make a project; `homes` has the nodes of each partition, by default one each."""
    disks, home = folder / "disks", folder / "project"
    place_partitions(disks, homes or [[node] for node in NODES])
    (home / "site-configs").mkdir(parents=True)
    for module in (*MODULES.values(), "handwriting"):
        shutil.copy(ENSEMBLES / f"{module}.py", home)
    text = ENSEMBLE.format(framework=framework, module=MODULES[framework], disks=disks, epochs=epochs)
    members = [MEMBER.format(number=k, config=json.dumps(config)) for k, config in enumerate(CONFIGS)]
    (home / "ensemble.yaml").write_text(text + "".join(members))
    rates = "".join(f"m{number},1,500,{640 * epochs}\n" for number in range(len(CONFIGS)))
    (home / "rates.csv").write_text("member,gpus,rate,samples\n" + rates)
    (home / "site-configs" / "lab.yaml").write_text(SITE.format(gpus=gpus, python=sys.executable))
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


def hop(project, *options):
    answer = project.hetctl(
        *("submit", "--mode", "hopper", "--gpus", "4", "--time", "10m", "--wait", "--json", *options)
    )
    assert answer.code == 0, answer
    assert answer.json["state"] == "finished"
    return events_in(project.home.run(answer.json["run"]))


def visits_of(events):
    """Return the visits that count, in the order of their ends."""
    undone = {(e.source, n) for e in events if e.kind == "visits_undone" for n in e.data["numbers"]}
    return [
        {"member": e.source, **e.data}
        for e in events
        if e.kind == "visit" and (e.source, e.data["number"]) not in undone
    ]


def assert_complete(visits, epochs=EPOCHS):
    """Assert that each member has trained and was evaluated on each partition once in each epoch."""
    seen = Counter((v["member"], v["epoch"], v["evaluates"], v["partition"]) for v in visits)
    assert set(seen.values()) == {1}
    assert len(seen) == len(CONFIGS) * epochs * 2 * 4
    for by in ("member", "worker"):
        last = Counter()
        for visit in sorted(visits, key=lambda visit: visit["began_at"]):
            assert visit["began_at"] >= last[visit[by]], f"two visits at a time of one {by}"
            last[visit[by]] = visit["ended_at"]


def assert_equal_to_one_process(project, visits):
    """Assert that the last checkpoints are, to the bit, those of one process that follows the visits."""
    home = project.home.run("hops-001")
    log = project.path / "visits.json"
    log.write_text(json.dumps([[v["member"], v["epoch"], v["partition"], v["evaluates"]] for v in visits]))
    template = str(project.path.parent / "all" / "{partition}.npz")
    command = [sys.executable, "-m", "hop_reference", str(home.path / "run.json"), str(log), template, "1"]
    path = f"{TESTS}:{project.path}:{TESTS.parent}"
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    expected = json.loads(done.stdout.splitlines()[-1])
    folder = project.home.checkpoints
    found = {
        name: digest_of(CheckpointFolder(member_folder(folder, "hops-001", name)).load().arrays)
        for name in expected
    }
    assert found == expected


def test_hops_equal_one_process_that_follows_the_log(project):
    events = hop(project)
    visits = visits_of(events)
    assert_complete(visits)
    homes = {visit["partition"]: visit["worker"] for visit in visits}
    assert homes == {number: f"{node}:0" for number, node in enumerate(NODES)}
    assert {visit["bytes"] > 0 for visit in visits if visit["number"] > 20} == {True, False}
    all_of_them = project.path.parent / "all"
    all_of_them.mkdir()
    for path in project.path.parent.glob("disks/*/*.npz"):
        shutil.copy(path, all_of_them)
    assert_equal_to_one_process(project, visits)
