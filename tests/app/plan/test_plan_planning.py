"""Plans of the catalog: what was planned is what is submitted, as long as nothing has changed."""

from __future__ import annotations

import pytest
from workbench import new_project

from hetctl.app.plan import planning
from hetctl.catalog.catalog import Catalog

SIZE = ("--site", "slurm", "--gpus", "2", "--time", "1h")


@pytest.fixture
def made(monkeypatch):
    """Plans that were made, in their order."""
    plans = []

    def plan_from(*arguments):
        plans.append(original(*arguments))
        return plans[-1]

    original = planning.plan_from
    monkeypatch.setattr(planning, "plan_from", plan_from)
    return plans


@pytest.fixture
def project(tmp_path, made):
    project = new_project(tmp_path / "project")
    assert project.here("profile", "import", "rates.csv", "--site", "slurm").code == 0
    assert project.here("plan", *SIZE, "--explain").code == 0
    assert len(made) == 1
    return project


def latest(project):
    with Catalog.open_to_read(project.home.catalog) as catalog:
        return catalog.latest_plan("trio", "slurm")


def test_the_saved_plan_is_submitted_if_nothing_has_changed(project, made):
    assert project.here("submit", *SIZE, "--dry-run").code == 0
    assert len(made) == 1
    assert latest(project).inputs


def test_two_plans_of_the_same_inputs_are_both_made(project, made):
    first = latest(project)
    assert project.here("plan", *SIZE).code == 0
    assert len(made) == 2
    assert latest(project).inputs == first.inputs


@pytest.mark.parametrize(
    "option", [("--time", "2h"), ("--planner", "doubling"), ("--alpha", "0.5"), ("--sharing", "none")]
)
def test_a_new_plan_is_made_if_an_option_has_changed(project, made, option):
    assert project.here("submit", *SIZE, *option, "--dry-run").code == 0
    assert len(made) == 2


def test_a_new_plan_is_made_if_a_rate_has_changed(project, made):
    rates = project.path / "rates.csv"
    rates.write_text(rates.read_text().replace("100", "140"))
    assert project.here("profile", "import", "rates.csv", "--site", "slurm").code == 0
    assert project.here("submit", *SIZE, "--dry-run").code == 0
    assert len(made) == 2


def test_a_new_plan_is_made_if_the_ensemble_has_changed(project, made):
    ensemble = project.path / "ensemble.yaml"
    ensemble.write_text(ensemble.read_text().replace("config: {}", "config: {}, seed: 7", 1))
    assert project.here("submit", *SIZE, "--dry-run").code == 0
    assert len(made) == 2
