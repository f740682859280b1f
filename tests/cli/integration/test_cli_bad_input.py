"""Bad input: one clear error, the right exit code, and nothing written or lost."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
from workbench import ENSEMBLE, ProjectFolder, new_project

from hetctl.catalog.catalog import Catalog
from hetctl.inputs import ensemble_file
from hetctl.model.profile import Hardware, ProfilePoint

SLURM = """\
extends: slurm
nodes: 4
gpus_per_node: 2
cores_per_node: 8
memory_per_node: 4GB
"""


@pytest.fixture
def project(tmp_path):
    return new_project(tmp_path / "project")


@pytest.fixture
def planned(project):
    assert project.here("profile", "import", "rates.csv", "--site", "local").code == 0
    return project


def refused(project, code, kind, *arguments, prefix=(), **environment):
    """Run a command that must fail: the same words for people and for programs, and no change."""
    before = project.tree()
    run = partial(project.hetctl, prefix=prefix) if prefix else project.here
    as_json = run(*arguments, "--json", **environment)
    error = as_json.error
    assert (as_json.code, error["kind"], as_json.stderr) == (code, kind, "")
    assert set(error) == {"kind", "message", "hint"}
    assert as_json.json["schema_version"] == 1
    for_people = run(*arguments, **environment)
    assert (for_people.code, for_people.stdout) == (code, "")
    assert error["message"] in for_people.stderr
    assert project.tree() == before
    return f"{error['message']} {error['hint']}"


def edited(project, old, new):
    assert old in ENSEMBLE
    (project.path / "ensemble.yaml").write_text(ENSEMBLE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("framework:", "framwork:", "framework"),
        ("patience: 50", "patiense: 50", "patience"),
        ("patience: 50", "patience: often", "patience"),
        ("max_epochs: 4", "max_epochs: 0", "max_epochs"),
        ("name: b", "name: a", "'a'"),
        ("name: b", "name: ../b", "../b"),
        ("name: b", "name: driver", "driver"),
        ("members:", "members: []\nothers:", "others"),
        ("model_fn: nets:model_fn", "model_fn: nets:modle_fn", "modle_fn"),
        ("model_fn: nets:model_fn", "model_fn: nest:model_fn", "nest"),
        ("framework: tensorflow", "framework: caffe", "caffe"),
    ],
)
def test_an_ensemble_file_with_a_mistake_is_refused_whole(project, old, new, said):
    edited(project, old, new)
    text = refused(project, 2, "bad-input", "plan", "--site", "local")
    assert said in text
    assert "ensemble.yaml" in text


@pytest.mark.parametrize("text", ["", "[", "name: x\nname: y\n", "\x00", "a: &a [*a]"])
def test_what_is_no_ensemble_file_is_refused(project, text):
    (project.path / "ensemble.yaml").write_text(text)
    refused(project, 2, "bad-input", "profile", "show", "--site", "local")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plna"], "plna"),
        (["plan", "--gpu", "2"], "--gpus"),
        (["plan", "--gpus", "0"], "0"),
        (["plan", "--gpus", "two"], "two"),
        (["plan", "--time", "soon"], "soon"),
        (["plan", "--planner", "flotila"], "flotilla"),
        (["plan", "--alpha", "3"], "alpha"),
        (["plan", "--queue", "night", "--site", "local"], "local"),
        (["submit", "--max-jobs", "0"], "max-jobs"),
        (["submit", "--gpu-hours", "nan"], "nan"),
        (["submit", "--gpu-hours", "inf"], "inf"),
        (["simulate", "--unit-times", "m.csv", "--efficiency", "nan"], "--efficiency"),
        (["simulate", "--gpus", "100000000"], "at most 1000000"),
        (["simulate", "--gpus", "4", "--report", "z", "--trace", "z"], "--trace"),
        (["render", "--run", "../x"], "--run"),
        (["status", "nothing"], "submit"),
        (["cancel", "nothing"], ""),
        (["profile", "import", "none.csv"], "none.csv"),
        (["report"], ""),
        (["plan", "--site", "sumit"], "summit"),
        (["hopper", "trace", "-o", "nowhere/t.jsonl"], "nowhere"),
    ],
)
def test_a_wrong_command_line_is_refused(project, arguments, said):
    assert said in refused(project, 2, "bad-input", *arguments, HETCTL_SITE="local")


def test_what_cannot_be_printed_as_json_is_told_on_stderr(project):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "hetctl", "status", "--json"]
        done = subprocess.run(command, cwd=project.path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("hetctl: there is no catalog in ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("member,gpus\na,1\n", "rates.csv:1: column 'rate' is missing"),
        ("member,gpus,rate\na,1,fast\n", "rates.csv:2: rate"),
        ("member,gpus,rate\na,1,-5\n", "rates.csv:2: rate"),
        ("member,gpus,rate\na,1,5\na,1,6\n", "rates.csv:3:"),
        ("member,gpus,rate\nz,1,5\n", "no member z"),
    ],
)
def test_a_wrong_rate_table_is_refused_whole(project, table, said):
    (project.path / "rates.csv").write_text(table)
    assert said in refused(project, 2, "bad-input", "profile", "import", "rates.csv", "--site", "local")


@pytest.mark.parametrize(
    ("own", "arguments", "said"),
    [
        ("min_gpus: 3", ("submit",), "min_gpus of b"),
        ("gpus: 2", ("plan", "--gpus", "1"), "gpus of b"),
        ("gpus: 3", ("profile",), "gpus of b"),
        ("", ("plan", "--gpus", "3"), "3 slots"),
        ("", ("plan", "--time", "13h"), "--time"),
    ],
)
def test_more_than_a_job_or_a_site_has_is_infeasible(planned, own, arguments, said):
    edited(planned, "- {name: b, config: {}}", f"- {{name: b, config: {{}}, {own}}}")
    assert said in refused(planned, 3, "infeasible", *arguments, "--site", "local")


def test_a_limit_of_gpus_above_the_site_limits_nothing(planned):
    edited(planned, "- {name: b, config: {}}", "- {name: b, config: {}, max_gpus: 8}")
    done = planned.here("plan", "--site", "local", "--json")
    assert done.code == 0, done.stderr
    assert {a["gpus"] for each in done.json["rounds"] for a in each["allocations"]} <= {1, 2}


def test_a_wrong_site_file_does_not_hide_how_to_avoid_it(planned):
    (planned.path / "site-configs").mkdir()
    (planned.path / "site-configs" / "wrong.yaml").write_text("extends: nowhere\n")
    done = planned.here("plan")
    assert (done.code, "wrong.yaml" in done.stderr, "--site" in done.stderr) == (2, True, True)
    assert planned.here("plan", "--site", "local").code == 0


def test_a_round_limit_shorter_than_a_start(planned):
    machine, now = Hardware("x", "x", "x"), time.time()
    with Catalog.open(planned.home.catalog) as catalog:
        points = [
            ProfilePoint(p.member, 1, 100.0, p.fingerprint, 32, now, machine, 400, startup_s=seconds)
            for p, seconds in zip(catalog.points("trio", "local"), (1, 3600, 1), strict=True)
        ]
        catalog.save_points("trio", "local", points)
    said = refused(planned, 3, "infeasible", "submit", "--site", "local", "--time", "10m")
    assert "start of b" in said
    assert "--time" in said


def test_an_unreachable_scheduler_begins_no_run(project):
    (project.path / "site-configs").mkdir()
    (project.path / "site-configs" / "cluster.yaml").write_text(SLURM)
    nowhere = {"HETCTL_SITE": "cluster", "PATH": str(project.path)}
    assert project.here("profile", "import", "rates.csv", **nowhere).code == 0
    done = project.here("submit", "--json", **nowhere)
    assert (done.code, done.error["kind"]) == (4, "batch-system")
    assert "squeue" in done.error["message"]
    assert list(project.home.runs.glob("*")) == []
    with Catalog.open(project.home.catalog) as catalog:
        assert catalog.runs() == []
    assert project.here("status", **nowhere).code == 2


def test_lockstep_on_nodes_that_the_launcher_chooses(planned):
    assert planned.here("profile", "import", "rates.csv", "--site", "summit").code == 0
    arguments = ("plan", "--site", "summit", "--planner", "flotilla", "--sharing", "lockstep", "--time", "1h")
    members = (*arguments, "--launch", "members", "--gpus")
    said = refused(planned, 2, "bad-input", *members, "12")
    assert "jsrun" in said
    for fine in ((*members, "6"), (*arguments, "--gpus", "12")):
        assert planned.here(*fine).code == 0


@pytest.mark.parametrize("arguments", [["cancel"], ["report"], ["search", "show"], ["cancel", "trio-007"]])
def test_a_catalog_without_runs_says_how_to_start_one(planned, arguments):
    assert "hetctl submit" in refused(planned, 2, "bad-input", *arguments)


def test_a_catalog_without_ensembles_is_like_none(project):
    (project.path / "ensemble.yaml").unlink()
    expected = refused(project, 2, "bad-input", "plan", "--gpus", "2")
    assert expected.startswith(f"there is no ensemble.yaml in {project.path}")
    with Catalog.open(project.home.catalog):
        pass
    assert refused(project, 2, "bad-input", "plan", "--gpus", "2") == expected


def test_an_edit_during_submit_does_not_mix_two_ensembles(planned, monkeypatch):
    """A second read would plan what the first one did not look for among the unfinished runs."""
    text = (planned.path / "ensemble.yaml").read_text()
    read = ensemble_file.read_ensemble

    def read_and_edit(path):
        found = read(path)
        path.write_text(text.replace("name: trio", "name: duo"))
        return found

    monkeypatch.setattr(ensemble_file, "read_ensemble", read_and_edit)
    shown = planned.here("submit", "--site", "local", "--dry-run", "--json")
    assert shown.code == 0, shown.stderr
    assert shown.json["run"] == "trio-001"


def test_a_catalog_of_a_newer_schema(planned):
    with sqlite3.connect(planned.home.catalog) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    for arguments in (["plan"], ["submit"], ["profile", "show"], ["status"]):
        assert "newer hetctl" in refused(planned, 2, "bad-input", *arguments, HETCTL_SITE="local")


def test_a_catalog_that_is_damaged(planned):
    planned.home.catalog.write_bytes(b"nothing like a database" * 500)
    assert "not a SQLite database" in refused(planned, 2, "bad-input", "plan", "--site", "local")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody who may not write")
@pytest.mark.parametrize("arguments", [["plan"], ["submit"], ["profile", "import", "rates.csv"]])
def test_a_read_only_directory(arguments):
    # Not in `tmp_path`: each start of pytest takes the folder above it from other users again.
    with tempfile.TemporaryDirectory() as folder:
        _refused_to_nobody(new_project(Path(folder) / "project"), arguments)


def _refused_to_nobody(project, arguments):
    assert project.here("profile", "import", "rates.csv", "--site", "local").code == 0
    for path in (project.path.parent, project.path, *project.path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")
    if subprocess.run([*nobody, sys.executable, "-c", "import hetctl.cli.main"], check=False).returncode:
        pytest.skip("another user cannot run this Python")
    said = refused(project, 2, "bad-input", *arguments, prefix=nobody, HETCTL_SITE="local", HOME="/")
    assert "HETCTL_HOME" in said


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 256 kB; nothing but root can make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "hetctl-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs leave to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("left", "words"),
    [(0, "No space left on device"), (8192, "catalog.db cannot be written: the disk is full")],
)
def test_a_submit_to_a_full_disk_is_refused_and_leaves_no_run(project, small_disk, left, words):
    home = {"HETCTL_HOME": str(small_disk / "home"), "HETCTL_SITE": "local"}
    assert project.here("profile", "import", "rates.csv", **home).code == 0
    (small_disk / "filler").write_bytes(b"x" * left)
    with pytest.raises(OSError, match="No space"):
        (small_disk / "rest").write_bytes(b"x" * 2**20)
    (small_disk / "filler").unlink()
    done = project.here("submit", "--json", **home)
    assert (done.code, done.error["kind"]) == (2, "bad-input"), done.error
    assert words in done.error["message"]
    assert "free some space" in done.error["hint"]
    assert list((small_disk / "home" / "runs").glob("*")) == []
    (small_disk / "rest").unlink()
    assert project.here("plan", **home).code == 0


def test_a_folder_that_holds_an_example_already_is_left_alone(project):
    (project.path / "digits.py").write_text("mine")
    done = project.here("init", ".")
    assert done.code == 2
    assert "exists already" in done.stderr
    assert (project.path / "digits.py").read_text() == "mine"


def test_a_project_begins_in_this_folder_or_another(project):
    assert "next: cd there; hetctl submit --wait" in project.here("init", "there").stdout
    assert "next: cd 'two words'; hetctl submit --wait" in project.here("init", "two words").stdout
    (project.path / "empty").mkdir()
    empty = ProjectFolder(project.path / "empty")
    assert "next: hetctl submit --wait" in empty.here("init").stdout
    assert (empty.path / "ensemble.yaml").read_text() == (project.path / "there/ensemble.yaml").read_text()


def test_an_unwritable_report_or_a_broken_module_is_bad_input(project):
    (project.path / "nets.py").write_text("def input_fn(:\n")
    refused(project, 2, "bad-input", "profile", "--site", "local")


def test_an_internal_error_is_named_as_a_bug(project, monkeypatch, capsys):
    from hetctl.app.project import Project
    from hetctl.cli import main

    monkeypatch.chdir(project.path)
    monkeypatch.setattr(Project, "here", lambda *_: 1 / 0)
    with pytest.raises(SystemExit, match="1"):
        main.main(["plan"])
    output = capsys.readouterr()
    assert "internal error: ZeroDivisionError" in output.err
    assert "Traceback" not in output.err
    with pytest.raises(ZeroDivisionError):
        main.main(["--debug", "plan"])
