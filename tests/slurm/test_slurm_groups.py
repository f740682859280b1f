"""Two nodes of a real Slurm: groups train as one rank does with the larger batch; members share samples."""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
import sharded_ranks
from led_round import wait_until
from tiny_networks import ENSEMBLES, MODULES, train_on
from workbench import ProjectFolder, wait_for

from hetctl.runtime.data.node_exchange import NodeStream
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.runtime.worker.member_trainer import GENERATORS, PREDICTIONS
from hetctl.storage.paths import member_folder
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import read_spec

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


@pytest.mark.parametrize("framework", ["tensorflow", pytest.param("pytorch", marks=pytest.mark.weekly)])
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
    project = project_of(
        "pytorch", slurm_cluster, tmp_path / "project", {"m": RANKS}, epochs=5, config={"rest_s": 0.2},
        functions=asdict(sharded_ranks.functions("resting_train_fn")),
        keys=f"global_batch_size: {RANKS * BATCH}, shard: true, min_gpus: 2, max_gpus: 4",
    )  # fmt: skip
    assert project.here("submit", "--gpus", "4", "--time", "10m").code == 0
    wait_for(lambda: len(losses_of(project)) >= 2)
    *_, lost = project.driver_events("wide-001")[0].data["nodes"]
    slurm_cluster.crash_node(lost["name"])
    try:
        wait_for(lambda: project.here("status", "--json").json["state"] == "finished")
    finally:
        slurm_cluster.boot_node(lost["name"])
    started = [e.data["placement"] for e in project.driver_events("wide-001") if e.kind == "task_started"]
    assert [len(placement) for placement in started] == [2, 1]
    (member,) = read_spec(project.home.run("wide-001")).ensemble.members
    alone = replace(member, shard=False, config={"rest_s": 0.0})
    _, (told,) = sharded_ranks.train(tmp_path / "alone", alone, 1, train_fn="resting_train_fn")
    wanted = [data["metrics"]["loss"] for kind, data in told["events"] if kind == "epoch"]
    assert losses_of(project) == pytest.approx(dict(enumerate(wanted, 1)), rel=1e-6)
    assert len(wanted) == 5


def losses_of(project):
    """Return the training loss of each epoch so far."""
    events = events_in(project.home.run("wide-001"))
    return {e.data["epoch"]: e.data["metrics"]["loss"] for e in events if e.kind == "epoch"}


MIGRATE = ("submit", "--planner", "fixed-4", "--gpus", "4", "--time", "10m", "--wait")


def test_samples_migrate_on_nodes_that_copy_their_partitions_and_remove_them(slurm_cluster, tmp_path):
    """Of two jobs the second fetches what had migrated; two ranks have 80 samples each, two 240.

    A file names the partitions; `test_data_partition_folder` has how those with a `source` go round.
    """
    shared, disks = tmp_path / "shared", tmp_path / "disks"
    source, path = f"{shared}/{{partition}}.npz", f"{disks}/$SLURMD_NODENAME/{{partition}}.npz"
    # Before the job the names of its nodes are unknown: these stand for the first and the second.
    lines = [
        f"{n},{path.format(partition=n)},{'one' if n < 2 else 'two'},{source.format(partition=n)}\n"
        for n in range(8)
    ]
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "parts.csv").write_text("partition,path,nodes,source\n" + "".join(lines))
    project = project_of(
        "pytorch", slurm_cluster, tmp_path / "project", {"m": RANKS}, epochs=8,
        functions={"input_fn": "handwriting:staged_input_fn", "train_fn": "tiny_torch:paced_train_fn"},
        partitions="{file: parts.csv}",
        config={**CONFIG, "seconds": 4 * [0.01], "seen": str(tmp_path / "seen")},
    )  # fmt: skip
    made = project.here("partition", str(shared), "--json").json
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
    assert len({each[end].split(":")[0] for each in migrated for end in ("source", "target")}) == 2
    seen = Counter(number for path in tmp_path.glob("seen-*") for number in path.read_text().split())
    assert sum(seen.values()) == 8 * SAMPLES
    assert len(seen) == SAMPLES
    assert max(seen.values()) - min(seen.values()) <= 2
    events = project.driver_events("wide-001")
    jobs = [[node["name"] for node in e.data["nodes"]] for e in events if e.kind == "job_started"]
    staged = [e.data for e in events if e.kind == "partitions_staged"]
    for nodes, own in zip(jobs, (staged[:2], staged[2:]), strict=True):
        copied = {data["node"]: data["copied"] for data in own}
        assert copied == {nodes[0]: [0, 1], nodes[1]: [2, 3, 4, 5, 6, 7]}
        assert [(data["kept"], data["errors"]) for data in own] == [([], []), ([], [])]
        assert sum(data["bytes"] for data in own) == sum(part["bytes"] for part in made["files"])
    assert {path.name for path in disks.iterdir()} == {name for nodes in jobs for name in nodes}
    assert list(disks.glob("*/*")) == list(disks.glob("*/.*")) == []
    assert len(list(shared.iterdir())) == 9


def migrations_of(project):
    """Return the data of the events about visits after each epoch, and of those about migrations."""
    events = events_in(project.home.run("wide-001"))
    return tuple([e.data for e in events if e.kind == kind] for kind in ("sample_accesses", "migration"))


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
