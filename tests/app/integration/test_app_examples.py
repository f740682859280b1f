"""Examples: `init` and `submit --wait` train them, without a profile."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml
from workbench import ProjectFolder

from hetctl.app.project import IMPORTED_BY, start_project

pytestmark = pytest.mark.training


@pytest.mark.parametrize("example", IMPORTED_BY)
def test_an_example_trains_with_two_commands(example, tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # hetctl asks for a site where jobs can be submitted from, and a Slurm may be installed here.
    project = ProjectFolder(tmp_path, environment={"PATH": path, "HETCTL_SITE": "local"})
    assert project.hetctl("init", "it", "--example", example).stdout.endswith("cd it; hetctl submit --wait\n")
    project.path /= "it"
    file = project.path / "ensemble.yaml"
    text = yaml.safe_load(file.read_text())
    # Of seven entries the first and the last, which is a grid; or the only one.
    text["members"] = text["members"][::6]
    if example != "script":  # whose epochs are short, and which is compared by its reports
        text["stop"] |= {"max_epochs": 1, "expected_epochs": 1}
    file.write_text(yaml.safe_dump(text))
    done = project.hetctl("submit", "--wait", "--json")
    assert done.code == 0, done.stderr
    members = done.json["members"]
    assert len(members) >= 4
    assert {member["state"] for member in members} == {"converged"}
    assert [one["nodes"] for one in done.json["comparison"]["clusters"]] == [1, 2, 4]


@pytest.mark.parametrize(
    ("missing", "file"),
    [
        ([], "digits.py"),
        (["keras"], "digits.py"),
        (["keras", "torch"], "train.py"),
        (["sklearn"], "train.py"),
    ],
)
def test_init_takes_an_example_that_trains_with_what_is_installed(missing, file, tmp_path, monkeypatch):
    for package in missing:
        monkeypatch.setitem(sys.modules, package, None)
    paths = start_project(tmp_path / "it", None)
    assert file in [path.name for path in paths]
    assert ("torch" in (tmp_path / "it" / file).read_text()) == (missing == ["keras"])


def test_init_takes_the_example_after_which_the_folder_is_named(tmp_path):
    start_project(tmp_path / "digits-pytorch", None)
    assert "import torch" in (tmp_path / "digits-pytorch" / "digits.py").read_text()
