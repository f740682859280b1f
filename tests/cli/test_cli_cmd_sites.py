"""``hetctl sites``: list, show, check."""

from __future__ import annotations

import pytest
from workbench import new_project

from hetctl.inputs.site_file import list_sites

MINE = "extends: slurm\n\naccount: ml-42\nnodes: 9\n"


@pytest.fixture
def project(tmp_path):
    project = new_project(tmp_path / "project")
    (project.path / "site-configs").mkdir()
    (project.path / "site-configs" / "mine.yaml").write_text(MINE)
    return project


def test_without_a_subcommand_the_sites_are_listed(project):
    alone, listed = project.here("sites", "--json"), project.here("sites", "list", "--json")
    assert alone.code == listed.code == 0
    assert alone.json == listed.json
    names = [one["site"]["name"] for one in alone.json["sites"]]
    assert names == sorted([name for name, _ in list_sites(project=None, home=None)] + ["mine"])


def test_json_goes_after_the_sub_commands_name(project):
    result = project.here("sites", "--json", "show", "mine")
    assert result.code == 2
    assert result.json["error"]["message"] == "--json goes after show"


def test_show_tells_where_each_key_comes_from(project):
    shown = project.here("sites", "show", "mine", "--json").json
    keys = {key["key"]: key for key in shown["keys"]}
    mine = str(project.path / "site-configs" / "mine.yaml")
    account = {"key": "account", "value": "ml-42", "file": mine, "line": 3, "measured_at": None}
    assert keys["account"] == account
    assert (keys["nodes"]["value"], keys["nodes"]["line"]) == (9, 4)
    assert keys["launcher"]["file"].endswith("slurm.yaml")
    assert (shown["site"]["nodes"], shown["site"]["launcher"]) == (9, "srun")


def test_show_prints_a_table_with_its_files(project):
    lines = [line.split() for line in project.here("sites", "show", "mine").stdout.splitlines()]
    (mark,) = [line[0] for line in lines if line and line[-1].endswith("mine.yaml")]
    assert ["account", f"{mark}:3", "ml-42"] in lines


@pytest.mark.parametrize("name", [name for name, _ in list_sites(project=None, home=None)])
def test_every_shipped_site_is_right(project, name):
    checked = project.here("sites", "check", name, "--json")
    assert checked.code == 0
    assert checked.json["site"] == name
    assert {"one-member", "packed-members", "resumed-round"} <= set(checked.json["cases"])


@pytest.mark.parametrize("base", ["local", "slurm", "lsf", "summit"])
def test_a_site_with_a_step_for_each_member_is_checked_too(project, base):
    (project.path / "mine.yaml").write_text(f"extends: {base}\nlaunch: members\n")
    assert project.here("sites", "check", "./mine.yaml").code == 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("nodes: 0\n", "bad.yaml:2: nodes: must be at least 1, got 0"),
        ("template: none.sh.j2\n", "bad.yaml:2: template: template 'none.sh.j2' of site 'bad' is in none of"),
        (
            "launcher: jsrun\nenvironment: {TMPDIR: /x}\n",
            "bad.yaml:3: environment: TMPDIR in the environment",
        ),
        ("launcher: local\n", "bad.yaml:2: launcher: 2 nodes; the launcher 'local' has at most 1"),
        (
            "queues: [{name: q, max_nodes: 1}]\nqueue: q\n",
            "bad.yaml:2: queues: no queue of site bad takes 2 nodes",
        ),
    ],
)
def test_what_is_wrong_is_said_by_file_and_line(project, lines, message):
    (project.path / "bad.yaml").write_text(f"extends: slurm\n{lines}")
    checked = project.here("sites", "check", "./bad.yaml", "--json")
    assert checked.code == 2
    assert message in checked.json["error"]["message"]


def test_a_template_that_fails_is_named(project):
    (project.path / "templates").mkdir()
    (project.path / "templates" / "mine.sh.j2").write_text("{{ nonesuch }}")
    (project.path / "bad.yaml").write_text("extends: slurm\ntemplate: mine.sh.j2\n")
    message = project.here("sites", "check", "./bad.yaml", "--json").json["error"]["message"]
    assert "bad.yaml:2: template: template 'mine.sh.j2' of site 'bad': 'nonesuch' is undefined" in message
