"""A run that has ended continues if there is more to train in it; else another one starts, and says why."""

from __future__ import annotations

import shutil

import pytest
from workbench import pretending, pretending_project

from hetctl.storage.paths import member_folder

ENSEMBLE = pretending("duo", 2, a="{to_the_limit: true}", b="{to_the_limit: true}")
C = "  - {name: c, max_gpus: 1, config: {to_the_limit: true}}\n"
LONGER = ENSEMBLE.replace("max_epochs: 2", "max_epochs: 3")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project whose only run is finished."""
    folder = tmp_path_factory.mktemp("finished")
    made = pretending_project(folder, ENSEMBLE + C)
    assert made.here("profile", "import", "rates.csv").code == 0
    (made.path / "ensemble.yaml").write_text(ENSEMBLE)
    assert made.here("submit", "--wait").stdout.startswith("starts duo-001\n")
    return made


@pytest.mark.parametrize(
    ("ensemble", "options", "said"),
    [
        (ENSEMBLE, [], "nothing left to train; a larger max_epochs"),
        (ENSEMBLE.replace("patience: 50", "patience: 60"), [], "nothing left to train"),
        (LONGER.replace("{name: b,", "{name: b, seed: 8,"), [], "seed of b differs"),
        (LONGER, ["--planner", "doubling"], "run duo-001 has planner fluid"),
        (LONGER.rsplit("  - ", 1)[0] + C, [], "member b differs"),
    ],
)
def test_another_run_starts_and_says_why(project, ensemble, options, said):
    (project.path / "ensemble.yaml").write_text(ensemble)
    before = project.tree()
    shown = project.here("submit", "--dry-run", *options, "--json").json
    assert (shown["run"], shown["continued"]) == ("duo-002", False)
    assert shown["note"].startswith("run duo-001 is finished and does not continue: ")
    assert said in shown["note"]
    for_people = project.here("submit", "--dry-run", *options).stderr
    assert for_people.startswith(f"# starts duo-002\n# {shown['note']}\n")
    assert project.tree() == before


def test_a_run_without_its_checkpoints_does_not_continue(project):
    (project.path / "ensemble.yaml").write_text(LONGER)
    folder = member_folder(project.home.checkpoints, "duo-001", "b")
    folder.rename(folder.with_name("away"))
    shown = project.here("submit", "--dry-run", "--json").json
    assert (shown["run"], shown["continued"]) == ("duo-002", False)
    assert "the checkpoints of b are gone" in shown["note"]
    folder.with_name("away").rename(folder)


@pytest.mark.parametrize(
    ("ensemble", "changed"), [(LONGER, "max_epochs of a, b: 3 (was 2)"), (ENSEMBLE + C, "member c")]
)
def test_it_continues_with_more_epochs_or_members(project, ensemble, changed):
    (project.path / "ensemble.yaml").write_text(ensemble)
    said = project.here("submit", "--dry-run").stderr
    assert said.startswith("# continues duo-001\n# it was finished, and has more to train now; ")
    assert "--new" in said.splitlines()[1]
    assert f"# {changed}" in said
    other = project.here("submit", "--dry-run", "--new", "--json").json
    assert (other["run"], other["continued"], other["note"]) == ("duo-002", False, "")


def test_what_was_trained_is_trained_on(project):
    """The last of this file: it changes the run."""
    (project.path / "ensemble.yaml").write_text(LONGER + C)
    done = project.here("submit", "--wait", "--json").json
    assert (done["run"], done["continued"], done["state"]) == ("duo-001", True, "finished")
    assert project.epochs("duo-001") == {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 2, 3]}
    again = project.here("submit", "--dry-run", "--json").json
    assert (again["run"], again["continued"]) == ("duo-002", False)
    shutil.rmtree(project.home.run("duo-001").path)
    assert "is gone" in project.here("submit", "--dry-run", "--json").json["note"]
