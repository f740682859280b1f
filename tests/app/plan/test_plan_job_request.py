"""What the user leaves open of a job's size is chosen by the work; what the user says is kept."""

from __future__ import annotations

import json

import pytest
from workbench import new_project

LOCAL = {"HETCTL_SITE": "local"}


@pytest.fixture
def project(tmp_path):
    made = new_project(tmp_path / "project", environment=LOCAL)
    assert made.here("profile", "import", "rates.csv").code == 0
    return made


def wall_line(project, *options):
    script = project.here("submit", "--dry-run", "--json", *options).json["script"]
    return next(line for line in script.splitlines() if line.startswith("left="))


def test_a_plan_says_what_each_job_asks_for_and_why(project):
    shown = project.here("plan", "--explain").stdout
    assert "each job: 1 node (2 slots) for 30:00 min in queue local; 1 job" in shown
    assert "Sizes of a job" in shown
    assert "→" in shown


def test_what_the_user_says_is_kept(project):
    shown = project.here("plan", "--gpus", "1", "--time", "2h").stdout
    assert "each job: 1 node (1 slot) for 2:00 h in queue local" in shown
    assert "expected" not in shown


def test_the_script_asks_for_the_time_that_was_chosen(project):
    assert wall_line(project) == "left=1800"
    assert wall_line(project, "--time", "1h") == "left=3600"


def test_without_a_profile_two_hours_of_the_whole_site(tmp_path):
    made = new_project(tmp_path / "project", environment=LOCAL)
    script = made.here("render", "--json").json["script"]
    assert "left=7200\n" in script


@pytest.mark.parametrize(
    ("wishes", "code"),
    [
        (("--gpus", "60", "--time", "2h"), 0),
        (("--gpus", "60", "--time", "6h"), 3),
        (("--gpus", "276", "--time", "6h"), 0),
    ],
)
def test_a_small_job_does_not_get_the_time_of_a_larger_bin(project, wishes, code):
    """On Summit ten nodes have two hours, and six begin at 46 nodes."""
    done = project.here("render", "--site", "summit", "--account", "ABC123", "--json", *wishes)
    assert done.code == code
    if code:
        assert "batch takes 46 to 91 nodes for 6" in json.loads(done.stdout)["error"]["message"]
