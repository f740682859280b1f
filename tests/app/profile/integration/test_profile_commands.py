"""Profiling of members that are commands: real scripts in real jobs on this machine."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from profiles import members, profiling_project
from workbench import TINY, alive, new_project, wait_for


def project_of(folder, *words: str, gpus: int = 1):
    command = json.dumps([sys.executable, "own_script.py", "--epochs", "10000", *words])
    ensemble = f"name: own\nstop: {{metric: val_loss, patience: 5, max_epochs: 9}}\ncommand: {command}\n"
    ensemble += f"members:\n  - {{name: a, max_gpus: {gpus}}}\n"
    project = new_project(folder / "project", ensemble, environment={"HETCTL_SITE": "local"})
    shutil.copy(TINY / "own_script.py", project.path)
    return project


def profiled(project, gpus: int, seconds: float):
    return project.here("profile", "--gpus", str(gpus), "--for", f"{seconds}", "--json")


def test_a_script_is_measured_and_stopped(tmp_path):
    project = project_of(tmp_path, "--epoch-s", "0.5", "--parts", "5", gpus=2)
    done = profiled(project, 2, 20)
    assert (done.code, [point["gpus"] for point in done.json["points"]]) == (0, [1, 2]), done
    for point in done.json["points"]:
        # It sleeps half a second for 100 samples; a report that arrives late shortens the next interval.
        assert 0 < point["rate"] <= 210
        assert (point["samples_per_epoch"], point["machine"]["framework"]) == (100, "command")
        assert point["startup_s"] > 0
        assert point["peak_memory_bytes"] > 2**20
        assert point["steps"] >= 6
    (folder,) = {path.parent for path in project.home.profiles.glob("*/measurements.json")}
    assert "stopped after" in (folder / "logs" / "a-1.log").read_text()
    assert list((folder / "scratch").iterdir()) == []
    assert profiled(project, 2, 20).json["known"] == 2
    assert project.here("plan", "--gpus", "2", "--json").code == 0
    wait_for(lambda: not alive(str(project.path)))


def test_what_a_script_writes_while_it_is_measured_replaces_nothing(tmp_path):
    project = project_of(tmp_path, "--epoch-s", "0.2", "--parts", "5")
    (project.path / "out").mkdir()
    (project.path / "out" / "result").write_text("mine")
    script = project.path / "own_script.py"
    writes = "import pathlib; pathlib.Path('out/result').write_text('new'); pathlib.Path('made').touch()\n"
    script.write_text(script.read_text().replace("import ", f"{writes}import ", 1))
    (project.path / "disk").symlink_to(tmp_path)
    assert project.here("profile", "--dry-run", "--json").json["linked"] == ["disk"]
    assert profiled(project, 1, 20).code == 0
    assert (project.path / "out" / "result").read_text() == "mine"
    assert not (project.path / "made").exists()


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--harm", "blind"], "the script has reported nothing"),
        (["--epochs", "1"], "too little for a rate (1 reports)"),
        (["--harm", "fail"], "ended with exit code 1: the data are not there"),
    ],
    ids=["blind", "one epoch", "failed"],
)
def test_a_script_without_a_rate_is_told_why(tmp_path, words, cause):
    done = profiled(project_of(tmp_path, *words), 1, 1.5)
    (failure,) = done.json["failures"]
    assert (done.code, cause in failure["error"]) == (5, True), failure
    assert ("profile import" in failure["error"]) == ("fail" not in words)


def test_layers_of_commands_are_refused(tmp_path):
    refused = project_of(tmp_path).here("profile", "--layers", "a", "--json")
    assert (refused.code, "does not see their layers" in refused.error["message"]) == (2, True)


def test_functions_have_no_time_of_their_own(tmp_path):
    project = profiling_project(tmp_path)
    members(project, a=(1, "{}"))
    refused = project.here("profile", "--for", "1m", "--json")
    assert (refused.code, "--for does not go with functions" in refused.error["message"]) == (2, True)


NVML_WITH_ONE_GPU = """
from types import SimpleNamespace
def nvmlInit(): pass
def nvmlSystemGetDriverVersion(): return "580"
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetPciInfo(handle): return SimpleNamespace(domain=0, bus=6, device=0)
def nvmlDeviceGetUUID(handle): return "GPU-1"
def nvmlDeviceGetName(handle): return "NVIDIA H100"
def unknown(*_): raise OSError("Not Supported")
nvmlDeviceGetMemoryInfo = nvmlDeviceGetCpuAffinity = nvmlDeviceGetMaxMigDeviceCount = unknown
"""


def test_a_node_with_fewer_gpus_than_the_site_says_is_named(tmp_path):
    """Seen on a machine with one H100: that the ranks were killed was all that the command said."""
    project = project_of(tmp_path, "--epoch-s", "0.5", gpus=2)
    site = project.path / "site-configs" / "local.yaml"
    site.parent.mkdir()
    site.write_text("extends: local\ndevice: gpu\ngpus_per_node: 2\n")
    (tmp_path / "pynvml.py").write_text(NVML_WITH_ONE_GPU)
    project.environment |= {"PYTHONPATH": str(tmp_path)}
    done = profiled(project, 2, 20)
    # The point in measurement is lost with its node, the one that waited with the job.
    errors = sorted(failure["error"] for failure in done.json["failures"])
    (log,) = project.home.profiles.glob("*/logs/agents.log")
    assert (done.code, errors) == (
        5,
        sorted([f"the job has lost all nodes: {log} says why", f"lost with localhost: {log} says why"]),
    )
    assert "step agents sees 1 GPUs on localhost, and not 2" in log.read_text()


def test_a_job_that_cannot_begin_says_why(tmp_path):
    project = project_of(tmp_path)
    (project.path / "lab.yaml").write_text("extends: local\npython: /nowhere/python\n")
    done = project.here("profile", "--gpus", "1", "--site", "./lab.yaml", "--json")
    (failure,) = done.json["failures"]
    assert (done.code, failure["error"]) == (5, "the job ended before it was measured")
    assert "/nowhere/python: No such file or directory" in failure["log_tail"][-1]
    assert failure["log"].endswith("job-0000.log")
