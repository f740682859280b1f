"""Where no site is named: on a machine that may be a login node nothing is trained by mistake."""

from __future__ import annotations

import pytest
from workbench import new_project

LOCAL = {"HETCTL_SITE": "local"}
ELSEWHERE = ["--site", "local"]
NEEDS_A_SITE = [
    ["profile"],
    ["profile", "show"],
    ["profile", "import", "rates.csv"],
    ["profile", "export"],
    ["plan"],
    ["render"],
    ["submit"],
    ["submit", "--dry-run"],
    ["doctor"],
]
NEEDS_NONE = [
    ["sites"],
    ["sites", "show", "slurm"],
    ["schema", "site"],
    ["status"],
    ["report"],
    ["simulate", "--gpus", "2"],
    ["advance"],
]


@pytest.fixture
def on_the_path(tmp_path, monkeypatch):
    """Have these commands, and no others, on the PATH; none of them may be called."""

    def put(*names):
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in names:
            (folder / name).write_text("#!/bin/sh\nexit 66\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.delenv("HETCTL_SITE", raising=False)

    return put


@pytest.fixture
def project(tmp_path):
    made = new_project(tmp_path / "project")
    assert made.here("profile", "import", "rates.csv", **LOCAL).code == 0
    return made


@pytest.mark.parametrize("arguments", NEEDS_A_SITE)
def test_where_jobs_can_be_submitted_a_site_must_be_named(project, on_the_path, arguments):
    on_the_path("sbatch")
    before = project.tree()
    refused = project.here(*arguments)
    assert (refused.code, refused.stdout) == (2, "")
    assert "Slurm (" in refused.stderr
    assert "bin/sbatch)" in refused.stderr
    assert "HETCTL_SITE" in refused.stderr
    assert "can extend slurm; --site local trains on this machine" in refused.stderr
    assert project.tree() == before


@pytest.mark.parametrize(
    ("commands", "said", "extend"),
    [
        (["bsub"], "LSF (", "extend lsf;"),
        (["sbatch", "bsub"], ") and LSF (", "extend slurm or lsf;"),
    ],
)
def test_every_batch_system_that_is_there_is_named(project, on_the_path, commands, said, extend):
    on_the_path(*commands)
    error = project.here("plan", "--json").error
    assert error["kind"] == "bad-input"
    assert said in error["message"]
    assert extend in error["hint"]


@pytest.mark.parametrize("named", [ELSEWHERE, []])
def test_a_site_that_is_named_counts(project, on_the_path, named):
    on_the_path("sbatch", "bsub")
    assert project.here("plan", *named, **({} if named else LOCAL)).code == 0


def test_a_site_that_fits_counts(project, on_the_path, monkeypatch):
    on_the_path("sbatch")
    monkeypatch.setattr("socket.getfqdn", lambda: "login7.mine.org")
    (project.path / "site-configs").mkdir()
    (project.path / "site-configs" / "mine.yaml").write_text(
        "extends: slurm\nhost_patterns: ['login*.mine.org']\n"
    )
    assert "#SBATCH" in project.here("render").stdout


def test_a_machine_without_a_batch_system_is_local(project, on_the_path):
    on_the_path()
    assert project.here("plan").code == 0


@pytest.mark.parametrize("arguments", NEEDS_NONE)
def test_what_needs_no_site_is_not_refused(project, on_the_path, arguments):
    on_the_path("sbatch")
    assert "no site fits" not in project.here(*arguments).stderr
