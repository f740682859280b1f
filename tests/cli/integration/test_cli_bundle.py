"""A run is bundled as an RO-Crate, and what differs elsewhere is named."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile

import pytest
from workbench import pretending, pretending_project

ENSEMBLE = pretending("duo", 2, a="{epochs: 2}", b="{epochs: 3}") + "data: samples\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with data, and a finished run with its bundle."""
    made = pretending_project(tmp_path_factory.mktemp("bundle"), ENSEMBLE)
    (made.path / "samples" / "more").mkdir(parents=True)
    (made.path / "samples" / "one.csv").write_text("1,2\n")
    (made.path / "samples" / "more" / "two.csv").write_text("3,4\n")
    assert made.here("submit", "--wait", "--json").json["state"] == "finished"
    assert made.here("bundle").code == 0
    return made


@pytest.fixture
def crate(project):
    with zipfile.ZipFile(project.path / "duo-001.crate.zip") as archive:
        yield archive


def test_the_metadata_describe_every_file(crate):
    metadata = json.loads(crate.read("ro-crate-metadata.json"))
    found = {each["@id"]: each for each in metadata["@graph"]}
    assert found["ro-crate-metadata.json"]["conformsTo"] == {"@id": "https://w3id.org/ro/crate/1.1"}
    files = {name for name, each in found.items() if each["@type"] == "File"}
    assert files == {*crate.namelist()} - {"ro-crate-metadata.json"}
    assert {each["@id"] for each in found["./"]["hasPart"]} == files
    for name in files:
        data = crate.read(name)
        assert found[name]["sha256"] == hashlib.sha256(data).hexdigest()
        assert found[name]["contentSize"] == str(len(data))


def test_the_run_is_an_action_with_inputs_and_results(crate):
    metadata = json.loads(crate.read("ro-crate-metadata.json"))
    found = {each["@id"]: each for each in metadata["@graph"]}
    run = found["#run"]
    assert (run["@type"], run["actionStatus"]) == ("CreateAction", "http://schema.org/CompletedActionStatus")
    assert found[run["instrument"]["@id"]]["@type"] == "SoftwareApplication"
    named = {each["@id"] for each in (*run["object"], *run["result"])}
    assert named <= found.keys()
    assert {"run.json", "#data/samples/one.csv", "#data/samples/more/two.csv"} < {
        each["@id"] for each in run["object"]
    }
    assert {"results.json", "epochs.jsonl"} == {each["@id"] for each in run["result"]}


def test_results_and_curves_are_those_of_the_run(project, crate):
    status = project.here("status", "--json").json
    results = json.loads(crate.read("results.json"))
    assert [each["best"] for each in results["members"]] == [each["best"] for each in status["members"]]
    lines = [json.loads(line) for line in crate.read("epochs.jsonl").splitlines()]
    assert [(each["member"], each["epoch"]) for each in lines] == [
        *(("a", epoch) for epoch in (1, 2)),
        *(("b", epoch) for epoch in (1, 2, 3)),
    ]


def test_nothing_differs_where_it_was_made(project):
    found = project.here("reproduce", "--check", "duo-001.crate.zip", "--json").json
    assert found["differences"] == []
    assert found["compared"] > 10


def test_differences_are_named(project, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(project.path, elsewhere, ignore=shutil.ignore_patterns(".hetctl"))
    other = type(project)(elsewhere)
    module = next(elsewhere.glob("*.py"))
    module.write_text(module.read_text() + "# edited\n")
    (elsewhere / "samples" / "one.csv").write_text("1,3\n")
    (elsewhere / "samples" / "more" / "two.csv").unlink()
    told = other.here("reproduce", "--check", "duo-001.crate.zip", "--json")
    differ = {each["what"]: each["here"] for each in told.json["differences"]}
    assert told.code == 2
    assert differ.keys() == {f"module {module.name}", "data samples/one.csv", "data samples/more/two.csv"}
    assert differ["data samples/more/two.csv"] is None
    assert "3 of " in told.error["message"]


def test_a_damaged_bundle_is_noticed(project, tmp_path):
    damaged = tmp_path / "damaged.zip"
    with zipfile.ZipFile(project.path / "duo-001.crate.zip") as kept, zipfile.ZipFile(damaged, "w") as made:
        for name in kept.namelist():
            made.writestr(name, b"{}" if name == "results.json" else kept.read(name))
    differ = project.here("reproduce", "--check", str(damaged), "--json").json["differences"]
    assert [each["what"] for each in differ] == ["results.json in the bundle"]


@pytest.mark.parametrize("content", [b"no archive", b""])
def test_another_file_is_no_bundle(project, tmp_path, content):
    (tmp_path / "other.zip").write_bytes(content)
    told = project.here("reproduce", "--check", str(tmp_path / "other.zip"), "--json")
    assert told.code == 2
    assert "is no bundle" in told.error["message"]


def test_a_bundle_is_not_replaced_unasked(project):
    told = project.here("bundle", "--json")
    assert told.code == 2
    assert "exists already" in told.error["message"]
    assert project.here("bundle", "--force").code == 0
