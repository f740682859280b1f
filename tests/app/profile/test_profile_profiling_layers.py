"""Profiling of layers and links as a command, with layers that only pretend to be measured."""

from __future__ import annotations

import pytest
from profiles import members, profiling_project
from workbench import alive, wait_for

from hetctl.inputs.layer_profile import read_layers
from hetctl.storage.profile_request import LAYERS, LINKS, ProfileTarget

LINKS_KEY = """\
links:
  intra_node: {bytes_per_s: 1.0e9, scaling: 0.5}
  inter_node: {latency_s: 0, bytes_per_s: 1.0e9}
"""


@pytest.fixture
def project(tmp_path):
    project = profiling_project(tmp_path)
    yield project
    wait_for(lambda: not alive(str(project.path)))


def site_of(project, text):
    (project.path / "site-configs").mkdir(exist_ok=True)
    (project.path / "site-configs" / "mine.yaml").write_text(f"extends: local\n{text}")
    return "--site", "mine"


def test_layers_and_links_are_measured_once(project):
    members(project, a=(1, "{}"), b=(1, "{layers: 2}"))
    first = project.here("profile", "--layers", "a", "--json")
    assert (first.code, first.json["measured"], first.json["known"]) == (0, 2, 0)
    (layers,) = first.json["layers"]
    assert [layer["name"] for layer in layers["layers"]] == ["l0", "l1", "l2"]
    assert [link["link"] for link in first.json["links"]] == ["intra-node"]
    both = project.here("profile", "--layers", "a", "--layers", "b", "--json")
    assert (both.json["measured"], both.json["known"]) == (1, 2)
    shown = project.here("profile", "show", "--layers", "b", "--json").json
    assert [len(one["layers"]) for one in shown["layers"]] == [2]
    assert "l1" in project.here("profile", "show", "--layers", "b").stdout
    members(project, a=(1, "{units: 9}"), b=(1, "{layers: 2}"))
    assert project.here("profile", "show", "--layers", "a", "--json").json["layers"] == []
    assert project.here("profile", "--layers", "b", "--force", "--json").json["measured"] == 2


def test_links_that_the_site_file_gives_are_not_measured(project):
    members(project, a=(1, "{}"))
    done = project.here("profile", "--layers", "a", "--json", *site_of(project, LINKS_KEY))
    assert (done.json["measured"], done.json["links"]) == (1, [])


def test_sites_show_measured_links_with_their_date(project):
    members(project, a=(1, "{}"))
    before = project.here("sites", "show", "local", "--json").json
    assert before["site"]["links"] is None
    assert project.here("profile", "--links").code == 0
    shown = project.here("sites", "show", "local", "--json").json
    (key,) = (key for key in shown["keys"] if key["key"] == "links")
    assert key["measured_at"] > 0
    assert len(key["value"]["intra_node"]["points"]) > 3
    assert shown["site"]["links"] == key["value"]
    assert "measured 20" in project.here("sites", "show", "local").stdout


def test_links_need_two_gpus(project):
    members(project, a=(1, "{}"))
    done = project.here("profile", "--links", "--gpus", "1")
    assert (done.code, "no two GPUs with a link" in done.stderr) == (2, True)
    assert not project.home.path.exists()


@pytest.mark.parametrize("command", [("profile",), ("profile", "show"), ("profile", "export")])
def test_layers_of_an_unknown_member_are_refused(project, command):
    members(project, vgg=(1, "{}"))
    done = project.here(*command, "--layers", "vgf")
    assert (done.code, "has no member 'vgf'; did you mean 'vgg'?" in done.stderr) == (2, True)
    assert not project.home.path.exists()


def test_a_member_that_cannot_be_cut_is_reported_in_one_line(project):
    members(project, bad=(1, "{layers: 0}"), good=(1, "{}"))
    site = site_of(project, LINKS_KEY)
    done = project.here("profile", "--layers", "bad", "--layers", "good", *site)
    assert done.code == 5
    assert "layers of bad: bad cannot be cut (return a sequence)" in done.stdout
    assert "good on one slot: fake" in done.stdout


def test_exported_layers_are_a_layer_profile(project):
    members(project, a=(1, "{}"))
    project.here("profile", "--layers", "a")
    path = project.path / "a.csv"
    assert project.here("profile", "export", "--layers", "a", "-o", str(path)).code == 0
    first = read_layers(path)[0]
    assert (first.layer.name, first.gpu_type, first.layer.workspace_bytes) == ("l0", "fake", 3 * 2**20)


def test_no_layers_leave_no_file_behind(project):
    members(project, a=(1, "{}"))
    project.here("profile", "--links")
    done = project.here("profile", "export", "--layers", "a", "-o", str(project.path / "a.csv"))
    assert (done.code, "the layers of a were not measured at site local" in done.stderr) == (2, True)
    assert not (project.path / "a.csv").exists()


def test_targets_have_sources_of_their_own():
    targets = [
        ProfileTarget("a", 1),
        ProfileTarget("a", 1, LAYERS),
        ProfileTarget("a", 1, LAYERS, "V100"),
        ProfileTarget("a", 1, LAYERS, "a/b c"),
        ProfileTarget("intra-node", 2, LINKS),
    ]
    sources = [target.source for target in targets]
    assert len(set(sources)) == len(targets)
    assert not [source for source in sources if "/" in source]
