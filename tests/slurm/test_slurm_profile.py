"""Profiling through an array of real Slurm jobs, with measurements that only pretend to measure."""

import itertools

import pytest
from workbench import new_project, python_without_training

from hetctl.core.events import read_folder
from hetctl.core.measurement import read_measurements

pytestmark = pytest.mark.slurm

SITE = """\
extends: slurm
nodes: 4
gpus_per_node: 2
cores_per_node: 8
memory_per_node: 6000MiB
queues: [{name: main, max_nodes: 4, max_wall: 1h}]
"""
ENSEMBLE = """\
name: array
framework: tensorflow
functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}
members:
  - {name: a, max_gpus: 2, config: {}}
  - {name: b, max_gpus: 2, config: {measure_s: 0.5}}
  - {name: c, max_gpus: 2, config: {fail: true}}
"""


@pytest.fixture
def project(tmp_path, slurm_cluster):
    environment = {**slurm_cluster.environment(), "HETCTL_SITE": "lab"}
    python = python_without_training(tmp_path)
    project = new_project(tmp_path / "project", ENSEMBLE, python=python, environment=environment)
    (project.path / "site-configs").mkdir()
    (project.path / "site-configs" / "lab.yaml").write_text(SITE)
    return project


def test_points_are_measured_by_the_elements_of_an_array_one_after_another(project, slurm_cluster):
    done = project.hetctl("profile", "--jobs", "3", "--at-once", "1", "--json")
    assert done.code == 5
    assert sorted((p["member"], p["gpus"]) for p in done.json["points"]) == [
        ("a", 1), ("a", 2), ("b", 1), ("b", 2),
    ]  # fmt: skip
    assert {failure["point"]["member"] for failure in done.json["failures"]} == {"c"}
    folders = sorted(project.home.profiles.iterdir())
    assert [len(read_measurements(folder).points) for folder in folders] == [2, 2, 2]
    spans = sorted(
        (min(times), max(times))
        for times in ([event.time for event in read_folder(f / "events")] for f in folders)
    )
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))
    (script,) = (folders[0] / "submitit").glob("*submission.sh")
    assert "#SBATCH --array=0-2%1" in script.read_text()
    results = list((folders[0] / "submitit").glob("*_result.pkl"))
    assert len(results) == 3
    assert all(path.stat().st_mode & 0o077 == 0 for path in results)
    names = slurm_cluster.run("squeue", "--noheader", "--states=all", "--array", "--format=%j").split()
    assert names.count("hetctl-profile-array") == 3
