"""Two nodes of a real Slurm: a network trains as a pipeline across them, loses a stage, then a node."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import replace

import pytest
from one_driver import problems
from piped_run import LAYERS, FollowedRun, differences, newest
from tiny_networks import ENSEMBLES
from workbench import ProjectFolder, ranks_of, wait_for

from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import checkpoint_folder, read_spec

pytestmark = [pytest.mark.slurm, pytest.mark.training]
RUN = "pipes-001"
ENSEMBLE = """\
name: pipes
framework: pytorch
functions: {input_fn: "piped_torch:input_fn", model_fn: "piped_torch:model_fn"}
samples_per_epoch: 640
stop: {metric: val_loss, patience: 9, max_epochs: 3}
members:
  - {name: m, batch_size: 16, seed: 3, layers: layers.csv,
     config: {optimizer: momentum, learning_rate: 0.02, pause_s: 0.2}}
"""
SITE = """\
extends: slurm
nodes: 2
gpus_per_node: 2
cores_per_node: 2
memory_per_node: 24000MiB
gpu_memory: 1GB
links:
  intra_node: {{bytes_per_s: 2.0e9, scaling: 0.8}}
  inter_node: {{latency_s: 1.0e-4, bytes_per_s: 1.0e9}}
queues: [{{name: main, max_nodes: 2, max_wall: 1h}}]
python: {python}
timeouts: {{silence: 10s, orphaned: 5s, lease: 30s}}
"""


@pytest.fixture
def project(slurm_cluster, tmp_path):
    (tmp_path / "site-configs").mkdir()
    for module in ("piped_torch", "handwriting"):
        shutil.copy(ENSEMBLES / f"{module}.py", tmp_path)
    (tmp_path / "ensemble.yaml").write_text(ENSEMBLE)
    (tmp_path / "layers.csv").write_text(LAYERS)
    (tmp_path / "site-configs" / "lab.yaml").write_text(SITE.format(python=sys.executable))
    return ProjectFolder(tmp_path, environment={**slurm_cluster.environment(), "HETCTL_SITE": "lab"})


def test_a_pipeline_loses_a_stage_and_a_node_but_no_wave(project, slurm_cluster, monkeypatch):
    options = ("--mode", "pipeline", "--policy", "ed", "--in-flight", "2", "--clock-distance", "1")
    planned = project.here("plan", *options, "--gpus", "4", "--json")
    assert planned.code == 0, planned
    answer = project.here("submit", *options, "--gpus", "4", "--time", "10m", "--json")
    assert answer.code == 0, answer
    folder = project.home.run(RUN)

    def saved_in(step):
        events = [event for event in events_in(folder) if event.source == "m"]
        starts = [at for at, event in enumerate(events) if event.kind == "started"]
        own = events[starts[step] :] if len(starts) > step else []
        return any(event.kind == "checkpoint" and event.data["part_samples"] for event in own)

    wait_for(lambda: saved_in(0), 120)
    os.kill(ranks_of(folder.path)[-1], signal.SIGKILL)
    wait_for(lambda: saved_in(1), 120)
    slurm_cluster.crash_node("n2")
    try:
        wait_for(lambda: project.here("status", "--json").json["state"] == "finished", 180)
    finally:
        slurm_cluster.boot_node("n2")
    assert problems(events_in(folder), epochs={"m": 3}) == []
    steps = [e for e in events_in(folder) if e.kind == "task_started"]
    assert [event.data["gpus"] for event in steps] == [4, 4, 2]
    monkeypatch.syspath_prepend(str(project.path))
    spec = read_spec(folder)
    ensemble = replace(spec.ensemble, folder=str(project.path))
    run = FollowedRun(folder, replace(spec, ensemble=ensemble), "m")
    run.assert_within_bounds()
    arrays, state = newest(checkpoint_folder(spec, "m"))
    assert [epoch.epoch for epoch in state.epochs] == [1, 2, 3]
    assert differences(run.follow(), arrays, 1e-12) == []
