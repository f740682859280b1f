"""Runs on a cluster of the stand-in for LSF, with jsrun and without."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest
import yaml
from profiles import measurings
from workbench import TIMEOUT_S, new_project, pretending_project, wait_for

from hetctl.app.project import Waits
from hetctl.storage.profile_request import read_jobs, write_jobs
from hetctl.storage.progress_fold import events_in

HOSTS = {"a1": (2, 2), "a2": (2, 2)}
SITE = """\
extends: summit
launcher: {launcher}
launch: {launch}
submit_by: {submit_by}
device: slot
nodes: 2
gpus_per_node: 2
cores_per_node: 2
memory_per_node: 2GB
gpu_type: null
queues: [{{name: normal, max_nodes: 2, max_wall: 1h}}]
queue: normal
directives: []
max_queued_jobs: null
"""
ENSEMBLE = """\
name: trio
framework: tensorflow
functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}
stop: {metric: val_accuracy, mode: max, patience: 50, max_epochs: 4}
members:
  - {name: a, max_gpus: 3, config: {units: 1}}
  - {name: b, max_gpus: 1, config: {units: 2}}
  - {name: c, max_gpus: 1, config: {units: 3}}
"""
FEW_EPOCHS = {"metric": "val_accuracy", "patience": 2, "max_epochs": 2}
WAYS = [
    ("jsrun", "file", "batch1", "members"),
    ("mpirun", "stdin", None, "nodes"),
]
"""Other tests here have jsrun by nodes; lines of mpirun by members are tested where they are rendered."""


def describe_site(project, launcher, submit_by="file", launch="nodes"):
    (project.path / "site-configs").mkdir()
    site = SITE.format(launcher=launcher, submit_by=submit_by, launch=launch)
    (project.path / "site-configs" / "lab.yaml").write_text(site)


@pytest.mark.parametrize(("launcher", "submit_by", "launch_host", "launch"), WAYS)
def test_every_way_to_run_on_lsf(start_lsf, tmp_path, launcher, submit_by, launch_host, launch):
    """By members, too, of which one has two slots on a node and one on the other."""
    cluster = start_lsf(hosts=HOSTS, launch_host=launch_host, parse_scripts=submit_by == "file")
    environment = {**cluster.environment(), "HETCTL_SITE": "lab"}
    quick = Waits(run_poll_s=0.1, profile_poll_s=0.1)
    project = pretending_project(tmp_path, ENSEMBLE, environment=environment, waits=quick)
    describe_site(project, launcher, submit_by, launch)

    profile = project.here("profile", "--json")
    assert (profile.code, len(profile.json["points"])) == (0, 5)
    run = project.here("submit", "--wait", "--json")
    assert (run.code, run.json["state"]) == (0, "finished"), run.stdout
    assert set(project.epochs()) == {"a", "b", "c"}
    names = [job["fields"]["job_name"] for job in cluster.ask("jobs")]
    assert names[0].startswith("hetctl-profile-trio-")
    assert names[1].startswith("hetctl-trio-001-0-")
    assert len(names) == 2


def test_profiling_jobs_left_measuring_are_followed_by_the_next(start_lsf, tmp_path):
    cluster = start_lsf(hosts=HOSTS, launch_host="batch1")
    environment = {**cluster.environment(), "HETCTL_SITE": "lab"}
    slow = ENSEMBLE.replace(
        "b, max_gpus: 1, config: {units: 2}", f"b, max_gpus: 1, config: {{gate: {tmp_path}/gate}}"
    )
    project = pretending_project(tmp_path, slow, environment=environment)
    describe_site(project, "jsrun")
    process = project.start("profile", "--jobs", "2")
    wait_for(lambda: measurings(project))
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, "on measuring" in stderr) == (143, True)
    (path,) = project.home.profiles.glob("*/jobs.json")
    write_jobs(path.parent, replace(read_jobs(path.parent), ids=()))  # as if killed before they were noted
    again = project.start("profile", "--json")
    assert "of these points already: following" in again.stderr.readline()
    (tmp_path / "gate").touch()
    stdout, _ = again.communicate(timeout=TIMEOUT_S)
    assert (again.returncode, len(json.loads(stdout)["points"])) == (0, 5)
    assert measurings(project) == ["a-1", "a-2", "a-3", "b-1", "c-1"]
    assert len(cluster.ask("jobs")) == 2


@pytest.mark.training
def test_the_digits_ensemble_trains_on_lsf_with_jsrun(start_lsf, tmp_path):
    """Two networks like its smallest, for two epochs each, one of them on two slots."""
    cluster = start_lsf(hosts=HOSTS, launch_host="batch1")
    project = new_project(tmp_path, environment={**cluster.environment(), "HETCTL_SITE": "lab"})
    assert project.here("init", "digits", "--example", "digits-pytorch").code == 0
    project.path = project.path / "digits"
    file = project.path / "ensemble.yaml"
    config = {"filters": 8, "learning_rate": 0.01}
    members = [{"name": name, "config": config, "gpus": gpus} for name, gpus in (("a", 2), ("b", 1))]
    ensemble = {**yaml.safe_load(file.read_text()), "stop": FEW_EPOCHS, "members": members}
    file.write_text(yaml.safe_dump(ensemble))
    describe_site(project, "jsrun")

    run = project.here("submit", "--wait", "--json")
    assert (run.code, run.json["state"]) == (0, "finished"), run.stdout
    assert {member["state"] for member in run.json["members"]} == {"converged"}
    epochs = [event for event in events_in(project.home.run("digits-001")) if event.kind == "epoch"]
    found = sorted((event.source, event.data["epoch"], event.data["gpus"]) for event in epochs)
    assert found == [("a", 1, 2), ("a", 2, 2), ("b", 1, 1), ("b", 2, 1)]
    assert {job["fields"]["stat"] for job in cluster.ask("jobs")} == {"DONE"}
