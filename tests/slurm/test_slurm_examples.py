"""An example on a cluster, with three commands; a site file that Slurm refuses does not stay in the way."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from workbench import ProjectFolder

pytestmark = pytest.mark.slurm
FILE = "extends: slurm\nnodes: 2\ngpus_per_node: 2\n"


def test_an_example_trains_on_a_site_that_was_corrected(slurm_cluster, tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    project = ProjectFolder(tmp_path, environment={**slurm_cluster.environment(), "PATH": path})
    assert project.here("init", "it", "--example", "script").code == 0
    project.path /= "it"
    # The placeholders of the site `slurm` have more GPUs than these nodes.
    refused = project.here("submit", "--wait", "--site", "slurm", "--json")
    assert (refused.code, "hetctl doctor" in refused.error["hint"]) == (4, True), refused
    (project.path / "cluster.yaml").write_text(FILE)
    done = project.here("submit", "--wait", "--site", "cluster.yaml", "--json")
    assert done.code == 0, done
    assert {member["state"] for member in done.json["members"]} == {"converged"}
    assert {len(task["gpus"]) for task in done.json["tasks"]} == {1}
