"""Two nodes of a real Slurm: groups train as one rank does with the larger batch; members share samples."""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from collections import Counter

import numpy as np
import pytest
from led_round import wait_until
from tiny_networks import ENSEMBLES, MODULES, train_on
from workbench import ProjectFolder, wait_for

from hetctl.runtime.data.node_exchange import NodeStream
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.runtime.worker.member_trainer import GENERATORS, PREDICTIONS
from hetctl.storage.paths import member_folder
from hetctl.storage.progress_fold import events_in

pytestmark = [pytest.mark.slurm, pytest.mark.training]
RANKS, BATCH, SAMPLES = 4, 16, 640
SEED = zlib.crc32(b"wide-001/0")
CONFIG = {"optimizer": "sgd", "learning_rate": 0.1}
ENSEMBLE = """\
name: wide
framework: {framework}
functions: {functions}
rescale_learning_rate: false
partitions: {partitions}
samples_per_epoch: {samples}
stop: {{metric: val_accuracy, mode: max, patience: 9, max_epochs: {epochs}}}
members:
"""
MEMBER = """\
  - {{name: {name}, config: {config}, batch_size: {batch}, {keys}, seed: 5}}
"""
SITE = """\
timeouts: {{lease: 30s}}
python: {python}
mpi: pmix
environment: {environment}
"""
RATES = "member,gpus,rate,samples\n"


@pytest.mark.parametrize("framework", MODULES)
def test_a_group_on_two_nodes_equals_one_rank_with_larger_batch(slurm_cluster, tmp_path, framework):
    project = project_of(framework, slurm_cluster, tmp_path / "project", {"m": RANKS})
    project.run("submit", "--gpus", "4", "--time", "10m", "--wait")
    (step,) = [e.data for e in project.driver_events("wide-001") if e.kind == "task_started"]
    assert [len(place["gpus"]) for place in step["placement"]] == [2, 2]
    seed = zlib.crc32(b"5/m")
    (one,), _ = train_on(framework, 1, RANKS * BATCH, CONFIG, tmp_path, samples=SAMPLES, seed=seed)
    group = CheckpointFolder(member_folder(project.home.checkpoints, "wide-001", "m")).load().arrays
    others = {f"{GENERATORS}{rank}" for rank in range(1, RANKS)}
    predictions = {f"{PREDICTIONS}{name}" for name in ("outputs", "targets")}
    assert group.keys() == one.keys() | others | predictions
    for name, array in one.items():
        np.testing.assert_allclose(group[name], array, rtol=2e-4, atol=2e-5, err_msg=name)


def test_lockstep_on_two_nodes_reads_each_sample_once(slurm_cluster, tmp_path):
    epochs, members = 3, {"a": 2, "b": 1, "c": 1}
    readings = tmp_path / "readings"
    project = project_of(
        "pytorch", slurm_cluster, tmp_path / "project", members,
        functions={"input_fn": "handwriting:rows_input_fn"}, epochs=epochs,
        variables={"READINGS": str(readings)},
    )  # fmt: skip
    run = project.run(
        "submit", "--planner", "flotilla", "--sharing", "lockstep", "--gpus", "4", "--time", "10m", "--wait"
    )
    assert {member["epochs"] for member in run["members"]} == {epochs}
    assert len(project.driver_events("wide-001")[0].data["nodes"]) == 2
    read = Counter(line.split()[0] for line in readings.read_text().splitlines())
    chunks = {rank: NodeStream(SAMPLES, BATCH, SEED, node=rank, nodes=2) for rank in (0, 1)}
    for node, times in read.items():
        numbers = Counter(line.split()[1] for line in readings.read_text().splitlines() if node in line)
        odd = [_odd(numbers, chunks[rank], times // BATCH) for rank in (0, 1)]
        # Some chunks were being prepared at the end; sample 0 tells every process what samples are like.
        assert min(odd) < 4 * BATCH < max(odd)
    assert len(read) == 2


def test_parts_of_a_network_on_two_nodes_go_on_when_one_dies(slurm_cluster, tmp_path):
    """The checkpoint of its four ranks is read by the two that are left: results are those of one rank."""
    divided = divided_project(slurm_cluster, tmp_path / "divided", "shard: true, min_gpus: 2, max_gpus: 4")
    whole = divided_project(slurm_cluster, tmp_path / "whole", "max_gpus: 1")
    assert divided.here("submit", "--gpus", "4", "--time", "10m").code == 0
    wait_for(lambda: len(losses_of(divided)) >= 2)
    *_, lost = divided.driver_events("wide-001")[0].data["nodes"]
    slurm_cluster.crash_node(lost["name"])
    try:
        wait_for(lambda: divided.here("status", "--json").json["state"] == "finished")
    finally:
        slurm_cluster.boot_node(lost["name"])
    started = [e.data["placement"] for e in divided.driver_events("wide-001") if e.kind == "task_started"]
    assert [len(placement) for placement in started] == [2, 1]
    whole.run("submit", "--gpus", "1", "--time", "10m", "--wait")
    found, wanted = losses_of(divided), losses_of(whole)
    assert list(found) == list(wanted) == [1, 2, 3, 4, 5]
    assert list(found.values()) == pytest.approx(list(wanted.values()), rel=1e-6)


def divided_project(cluster, folder, keys):
    """Make a project of one member with a constant global batch, and these keys."""
    return project_of(
        "pytorch", cluster, folder, {"m": RANKS}, epochs=5, config={"rest_s": 0.1},
        functions={f"{name}_fn": f"sharded_torch:{name}_fn" for name in ("input", "model")}
        | {"train_fn": "sharded_torch:resting_train_fn"},
        keys=f"global_batch_size: {RANKS * BATCH}, {keys}",
    )  # fmt: skip


def losses_of(project):
    """Return the training loss of each epoch so far."""
    events = events_in(project.home.run("wide-001"))
    return {e.data["epoch"]: e.data["metrics"]["loss"] for e in events if e.kind == "epoch"}


MIGRATE = ("submit", "--planner", "fixed-4", "--gpus", "4", "--time", "10m", "--wait")


def test_samples_migrate_until_their_visits_are_equal(slurm_cluster, tmp_path):
    """The second of two jobs fetches what had migrated; two ranks have 80 samples each, two 240."""
    parts = tmp_path / "parts"
    place_images(parts, {0: [0, 1], 1: [2, 3, 4, 5, 6, 7]})
    project = project_of(
        "pytorch", slurm_cluster, tmp_path / "project", {"m": RANKS}, epochs=8,
        functions={"input_fn": "handwriting:part_input_fn", "train_fn": "tiny_torch:paced_train_fn"},
        partitions=f"{{count: 8, path: '{parts}/$SLURM_NODEID/{{partition}}.npz'}}",
        config={**CONFIG, "seconds": 4 * [0.01], "seen": str(tmp_path / "seen")},
    )  # fmt: skip
    assert project.here(*MIGRATE[:-1]).code == 0
    wait_until(lambda: len(migrations_of(project)[0]) >= 3)
    assert project.here("cancel").code == 0
    first_job = sum(each["samples"] for each in migrations_of(project)[1])
    project.run(*MIGRATE)
    visits, migrated = migrations_of(project)
    assert [each["epoch"] for each in visits] == list(range(1, 9))
    assert visits[-1]["held"] == pytest.approx([160, 160, 160, 160], abs=20)
    assert [each["most"] - each["fewest"] <= 2 for each in visits] == 8 * [True]
    assert sum(each["samples"] for each in migrated) >= first_job + 140
    assert {each["bytes"] // each["samples"] for each in migrated} == {8 * 8 * 4 + 8}
    nodes = {each[end].split(":")[0] for each in migrated for end in ("source", "target")}
    assert len(nodes) == 2
    seen = Counter(number for path in tmp_path.glob("seen-*") for number in path.read_text().split())
    assert sum(seen.values()) == 8 * SAMPLES
    assert len(seen) == SAMPLES
    assert max(seen.values()) - min(seen.values()) <= 2


def test_nodes_copy_their_partitions_and_remove_them(slurm_cluster, tmp_path):
    """Those that a file names; `test_data_stage_in` has how partitions with a `source` go round the nodes."""
    shared, disks = tmp_path / "shared", tmp_path / "disks"
    source, path = f"{shared}/{{partition}}.npz", f"{disks}/$SLURMD_NODENAME/{{partition}}.npz"
    # Before the job the names of its nodes are unknown: these stand for the first and the second.
    lines = [
        f"{n},{path.format(partition=n)},{('one', 'two')[n % 2]},{source.format(partition=n)}\n"
        for n in range(8)
    ]
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "parts.csv").write_text("partition,path,nodes,source\n" + "".join(lines))
    project = project_of(
        "pytorch", slurm_cluster, tmp_path / "project", {"m": RANKS},
        functions={"input_fn": "handwriting:staged_input_fn"}, partitions="{file: parts.csv}",
    )  # fmt: skip
    made = project.here("partition", str(shared), "--json").json
    project.run(*MIGRATE)
    started, *events = project.driver_events("wide-001")
    nodes = [node["name"] for node in started.data["nodes"]]
    staged = {event.data["node"]: event.data for event in events if event.kind == "partitions_staged"}
    assert {node: data["copied"] for node, data in staged.items()} == {
        nodes[0]: [0, 2, 4, 6], nodes[1]: [1, 3, 5, 7],
    }  # fmt: skip
    assert [(data["kept"], data["errors"]) for data in staged.values()] == [([], []), ([], [])]
    assert sum(data["bytes"] for data in staged.values()) == sum(p["bytes"] for p in made["files"])
    visits, _ = migrations_of(project)
    assert [sum(each["held"]) for each in visits] == [SAMPLES, SAMPLES]
    assert sorted(path.name for path in disks.iterdir()) == sorted(nodes)
    assert list(disks.glob("*/*")) == list(disks.glob("*/.*")) == []
    assert len(list(shared.iterdir())) == 9


def migrations_of(project):
    """Return the data of the events about visits after each epoch, and of those about migrations."""
    events = events_in(project.home.run("wide-001"))
    return tuple([e.data for e in events if e.kind == kind] for kind in ("sample_accesses", "migration"))


def place_images(folder, places):
    """Write parts of some images, as many samples each, into a folder for each node."""
    rng = np.random.default_rng(0)
    x, y = rng.random((SAMPLES, 8, 8, 1), dtype=np.float32), rng.integers(0, 10, SAMPLES)
    for node, numbers in places.items():
        (folder / str(node)).mkdir(parents=True)
        for number in numbers:
            part = slice(80 * number, 80 * (number + 1))
            np.savez(folder / str(node) / f"{number}.npz", x=x[part], y=y[part])


def _odd(numbers, stream, chunks):
    """Count how many samples other than those of a node's first chunks were read, or were not."""
    mine = Counter(str(number) for position in range(chunks) for number in stream.at(position).numbers)
    return sum(count for number, count in ((numbers - mine) + (mine - numbers)).items() if number != "0")


class Project(ProjectFolder):
    """A project with a site of two nodes."""

    def run(self, *arguments):
        answer = self.here(*arguments, "--json")
        assert answer.code == 0, answer
        assert answer.json["state"] == "finished"
        return answer.json


def project_of(
    framework,
    cluster,
    folder,
    members,
    functions=None,
    config=CONFIG,
    epochs=2,
    partitions="null",
    variables=None,
    keys="max_gpus: {gpus}",
):
    """Make one whose members have at most so many GPUs each, or these keys."""
    folder.mkdir(exist_ok=True)
    module = MODULES[framework]
    for each in (*MODULES.values(), "handwriting", "sharded_torch"):
        shutil.copy(ENSEMBLES / f"{each}.py", folder)
    text = ENSEMBLE.format(
        framework=framework,
        functions=json.dumps(
            {"input_fn": f"{module}:input_fn", "model_fn": f"{module}:model_fn", **(functions or {})}
        ),
        epochs=epochs,
        partitions=partitions,
        samples=SAMPLES,
    )
    rates = RATES
    for name, gpus in members.items():
        own = keys.format(gpus=gpus)
        text += MEMBER.format(name=name, config=json.dumps(config), batch=BATCH, keys=own)
        rates += "".join(f"{name},{k},{100 * k},{SAMPLES * epochs}\n" for k in (1, 2, 4) if k <= gpus)
    (folder / "ensemble.yaml").write_text(text)
    (folder / "rates.csv").write_text(rates)
    mpi = {name: value for name, value in cluster.environment().items() if name.startswith("OMPI")}
    site = SITE.format(python=sys.executable, environment=json.dumps(mpi | (variables or {})))
    project = Project(folder, environment=cluster.lab(folder, site))
    assert project.here("profile", "import", "rates.csv").code == 0
    return project
