"""Groups over two nodes of a real Slurm: they train as one rank does with the larger batch."""

from __future__ import annotations

import json
import shutil
import sys
import zlib

import numpy as np
import pytest
from tiny_networks import ENSEMBLES, MODULES, train_on
from workbench import ProjectFolder

from hetctl.runtime.checkpoint import CheckpointFolder

pytestmark = [pytest.mark.slurm, pytest.mark.training]
RANKS, BATCH, SAMPLES = 4, 16, 640
CONFIG = {"optimizer": "sgd", "learning_rate": 0.1}
ENSEMBLE = """\
name: wide
framework: {framework}
functions: {{input_fn: {module}:input_fn, model_fn: {module}:model_fn}}
stop: {{metric: val_accuracy, mode: max, patience: 9, max_epochs: 2}}
members:
  - {{name: m, config: {config}, batch_size: {batch}, seed: 5, rescale_learning_rate: false, max_gpus: 4}}
"""
SITE = """\
extends: slurm
nodes: 4
gpus_per_node: 2
cores_per_node: 8
memory_per_node: 6000MiB
queues: [{{name: main, max_nodes: 4, max_wall: 1h}}]
python: {python}
"""
RATES = "member,gpus,rate,samples\nm,1,100,1280\nm,2,200,1280\nm,4,400,1280\n"


@pytest.mark.parametrize("framework", MODULES)
def test_a_group_over_two_nodes_equals_one_rank_with_the_larger_batch(slurm_cluster, tmp_path, framework):
    project = project_of(framework, slurm_cluster, tmp_path / "project")
    assert project.hetctl("profile", "import", "rates.csv").code == 0
    run = project.hetctl("submit", "--gpus", "4", "--time", "10m", "--wait", "--json")
    assert (run.code, run.json["state"]) == (0, "finished"), run
    (step,) = [e.data for e in project.driver_events("wide-001") if e.kind == "step_started"]
    assert [len(place["gpus"]) for place in step["placement"]] == [2, 2]
    seed = zlib.crc32(b"5/m")
    (one,), _ = train_on(framework, 1, RANKS * BATCH, CONFIG, tmp_path, samples=SAMPLES, seed=seed)
    group = CheckpointFolder(project.home.checkpoints("wide-001", "m")).load().arrays
    assert one.keys() == group.keys()
    for name, array in one.items():
        np.testing.assert_allclose(group[name], array, rtol=2e-4, atol=2e-5, err_msg=name)


def project_of(framework, cluster, folder):
    (folder / "site-configs").mkdir(parents=True)
    for module in MODULES.values():
        shutil.copy(ENSEMBLES / f"{module}.py", folder)
    config = json.dumps(CONFIG)
    text = ENSEMBLE.format(framework=framework, module=MODULES[framework], config=config, batch=BATCH)
    (folder / "ensemble.yaml").write_text(text)
    (folder / "rates.csv").write_text(RATES)
    (folder / "site-configs" / "lab.yaml").write_text(SITE.format(python=sys.executable))
    return ProjectFolder(folder, environment={**cluster.environment(), "HETCTL_SITE": "lab"})
