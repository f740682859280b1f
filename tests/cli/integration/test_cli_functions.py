"""``hetctl submit`` with functions of one's own: a context for ``train_fn``, and ``evaluate_fn``."""

from __future__ import annotations

import shutil

import pytest
from tiny_networks import ENSEMBLES, context_in
from workbench import ProjectFolder

from hetctl.runtime.worker.checkpoint import CheckpointFolder

ENSEMBLE = """\
name: own
framework: pytorch
functions:
  input_fn: tiny_torch:input_fn
  model_fn: tiny_torch:model_fn
  train_fn: tiny_torch:mixed_train_fn
  evaluate_fn: handwriting:evaluate_fn
stop: {metric: val_auc, patience: 9, max_epochs: 2}
members:
  - {name: m, max_gpus: 1, config: {scaled: true, plateau: true}}
"""
PARTS = "partitions: {count: 2, path: '/parts/{partition}.npz'}\nsamples_per_epoch: 640\n"


@pytest.fixture
def project(tmp_path):
    for module in ("tiny_torch", "handwriting"):
        shutil.copy(ENSEMBLES / f"{module}.py", tmp_path)
    (tmp_path / "ensemble.yaml").write_text(ENSEMBLE)
    (tmp_path / "rates.csv").write_text("member,gpus,rate,samples\nm,1,1000,640\n")
    made = ProjectFolder(tmp_path, environment={"HETCTL_SITE": "local"})
    assert made.here("profile", "import", "rates.csv").code == 0
    return made


@pytest.mark.training
def test_a_run_trains_with_a_context_and_stops_by_auc(project):
    done = project.here("submit", "--wait", "--json")
    assert (done.code, done.json["state"]) == (0, "finished"), done.stderr
    loaded = CheckpointFolder(project.home.checkpoints / "own-001" / "m").load()
    one, two = (epoch.metrics for epoch in loaded.state.epochs)
    assert two["val_auc"] > 0.8
    assert one["val_in_order"] == two["val_in_order"] == 1.0
    context = context_in(loaded.arrays, "pytorch")
    assert (context["step"], context["metrics"]) == (40, two)
    assert context["state"]["values"]["ended"] == [[1, 20], [2, 40]]
    assert len(context["state"]["objects"]["average"]) == 4
