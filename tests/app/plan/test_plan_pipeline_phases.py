"""Pipelines of members whose layers were measured by real training at this machine."""

import shutil

import pytest
from tiny_networks import ENSEMBLES
from workbench import new_project

from hetctl.app.pipeline import measured_profile
from hetctl.app.profile.catalog_profiles import rows_of
from hetctl.app.profile.profiling import LayerOutcome
from hetctl.methods.pipeline.stage_costs import bytes_alone
from hetctl.model.serialization import decode

pytestmark = pytest.mark.training
TORCH = """\
name: tiny
framework: pytorch
functions: {input_fn: tiny_torch:input_fn, model_fn: tiny_torch:model_fn}
stop: {metric: val_accuracy, mode: max, max_epochs: 2}
members:
  - {name: wide, batch_size: 32, config: {units: 65536}}
  - {name: uncut, config: {uncut: true}}
"""


def write_site(project, text):
    (project.path / "site-configs").mkdir(exist_ok=True)
    (project.path / "site-configs" / "mine.yaml").write_text(f"extends: local\n{text}")


def test_a_pipeline_is_planned_from_measured_layers(tmp_path):
    project = new_project(tmp_path / "project", TORCH)
    for module in ("tiny_torch", "handwriting"):
        shutil.copy(ENSEMBLES / f"{module}.py", project.path)
    write_site(project, "")
    site = ("--site", "mine")
    done = project.here("profile", "--layers", "wide", "--layers", "uncut", "--json", *site)
    assert done.code == 5
    (failure,) = done.json["failures"]
    assert failure["point"]["member"] == "uncut"
    assert "it cannot be cut into stages" in failure["error"]
    (wide,) = decode(LayerOutcome, done.json).layers
    needed = wide.context_bytes + bytes_alone(measured_profile(rows_of([wide])))
    (project.path / "ensemble.yaml").write_text(TORCH[: TORCH.index("  - {name: uncut")])
    # All layers need one MiB more than a slot has.
    write_site(project, f"gpu_memory: {(needed >> 20) - 1}MiB\n")
    plan = project.here("plan", "--mode", "auto", "--gpus", "2", "--json", *site)
    assert plan.code == 0, plan.stdout
    (choice,) = plan.json["choices"]
    assert (choice["member"], choice["mode"]) == ("wide", "pipeline")
    assert plan.json["predicted_makespan_s"] > 0
