"""Two nodes of a real Slurm: groups train as one rank does with the larger batch; members share samples."""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from collections import Counter

import numpy as np
import pytest
from tiny_networks import ENSEMBLES, MODULES, train_on
from workbench import ProjectFolder

from hetctl.runtime.data.sharing.broadcast import NodeStream
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.storage.paths import member_folder

pytestmark = [pytest.mark.slurm, pytest.mark.training]
RANKS, BATCH, SAMPLES = 4, 16, 640
SEED = zlib.crc32(b"wide-001/0")
CONFIG = {"optimizer": "sgd", "learning_rate": 0.1}
ENSEMBLE = """\
name: wide
framework: {framework}
functions: {{input_fn: {input_fn}, model_fn: {module}:model_fn}}
rescale_learning_rate: false
stop: {{metric: val_accuracy, mode: max, patience: 9, max_epochs: {epochs}}}
members:
"""
MEMBER = """\
  - {{name: {name}, config: {config}, batch_size: {batch}, max_gpus: {gpus}, seed: 5}}
"""
SITE = """\
extends: slurm
nodes: 4
gpus_per_node: 2
cores_per_node: 8
memory_per_node: 6000MiB
queues: [{{name: main, max_nodes: 4, max_wall: 1h}}]
python: {python}
mpi: pmix
environment: {environment}
"""
RATES = "member,gpus,rate,samples\n"


@pytest.mark.parametrize("framework", MODULES)
def test_a_group_on_two_nodes_equals_one_rank_with_larger_batch(slurm_cluster, tmp_path, framework):
    project = project_of(framework, slurm_cluster, tmp_path / "project", {"m": RANKS})
    project.run("submit", "--gpus", "4", "--time", "10m", "--wait")
    (step,) = [e.data for e in project.driver_events("wide-001") if e.kind == "step_started"]
    assert [len(place["gpus"]) for place in step["placement"]] == [2, 2]
    seed = zlib.crc32(b"5/m")
    (one,), _ = train_on(framework, 1, RANKS * BATCH, CONFIG, tmp_path, samples=SAMPLES, seed=seed)
    group = CheckpointFolder(member_folder(project.home.checkpoints, "wide-001", "m")).load().arrays
    assert one.keys() == group.keys()
    for name, array in one.items():
        np.testing.assert_allclose(group[name], array, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("framework", MODULES)
def test_lockstep_on_two_nodes_reads_each_sample_once(slurm_cluster, tmp_path, framework):
    epochs, members = 3, {"a": 2, "b": 1, "c": 1}
    readings = tmp_path / "readings"
    project = project_of(
        framework, slurm_cluster, tmp_path / "project", members,
        input_fn="tiny:rows_input_fn", epochs=epochs, READINGS=str(readings),
    )  # fmt: skip
    run = project.run(
        "submit", "--planner", "flotilla", "--sharing", "lockstep", "--gpus", "4", "--time", "10m", "--wait"
    )
    assert {member["epochs"] for member in run["members"]} == {epochs}
    job = project.home.run("wide-001").job(0)
    assert len(project.driver_events("wide-001")[0].data["nodes"]) == 2
    assert [line for line in job.exchange_log.read_text().splitlines() if "chunks" in line]
    read = Counter(line.split()[0] for line in readings.read_text().splitlines())
    chunks = {rank: NodeStream(SAMPLES, BATCH, SEED, node=rank, nodes=2) for rank in (0, 1)}
    for node, times in read.items():
        numbers = Counter(line.split()[1] for line in readings.read_text().splitlines() if node in line)
        odd = [_odd(numbers, chunks[rank], times // BATCH) for rank in (0, 1)]
        # Some chunks were being prepared at the end; sample 0 tells every process what samples are like.
        assert min(odd) < 4 * BATCH < max(odd)
    assert len(read) == 2


def _odd(numbers, stream, chunks):
    """Count how many samples other than those of a node's first chunks were read, or were not."""
    mine = Counter(str(number) for position in range(chunks) for number in stream.at(position).numbers)
    return sum(count for number, count in ((numbers - mine) + (mine - numbers)).items() if number != "0")


class Project(ProjectFolder):
    """A project with a site of two nodes."""

    def run(self, *arguments):
        answer = self.hetctl(*arguments, "--json")
        assert answer.code == 0, answer
        assert answer.json["state"] == "finished"
        return answer.json


def project_of(framework, cluster, folder, members, input_fn=None, epochs=2, **variables):
    """Make one whose members have so many GPUs each."""
    (folder / "site-configs").mkdir(parents=True)
    module = MODULES[framework]
    for each in (*MODULES.values(), "handwriting"):
        shutil.copy(ENSEMBLES / f"{each}.py", folder)
    text = ENSEMBLE.format(
        framework=framework, module=module, input_fn=input_fn or f"{module}:input_fn", epochs=epochs
    )
    rates = RATES
    for name, gpus in members.items():
        text += MEMBER.format(name=name, config=json.dumps(CONFIG), batch=BATCH, gpus=gpus)
        rates += "".join(f"{name},{k},{100 * k},{SAMPLES * epochs}\n" for k in (1, 2, 4) if k <= gpus)
    (folder / "ensemble.yaml").write_text(text)
    (folder / "rates.csv").write_text(rates)
    mpi = {name: value for name, value in cluster.environment().items() if name.startswith("OMPI")}
    site = SITE.format(python=sys.executable, environment=json.dumps(mpi | variables))
    (folder / "site-configs" / "lab.yaml").write_text(site)
    project = Project(folder, environment={**cluster.environment(), "HETCTL_SITE": "lab"})
    assert project.hetctl("profile", "import", "rates.csv").code == 0
    return project
