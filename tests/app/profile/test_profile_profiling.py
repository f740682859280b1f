"""Profiling as a command, with measurements that only pretend to measure."""

from __future__ import annotations

import os
import signal

import pytest
from profiles import events_below, local_jobs, measured, members, profiling_project
from workbench import TIMEOUT_S, alive, wait_for

from hetctl.catalog.catalog import Catalog
from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.profile import Hardware, ProfilePoint
from hetctl.storage.event_files import read_folder
from hetctl.storage.profile_request import read_measurements


@pytest.fixture
def project(tmp_path):
    project = profiling_project(tmp_path)
    yield project
    (project.path / "gate").touch()
    wait_for(lambda: not alive(str(project.path)))


def test_each_member_is_measured_on_as_many_gpus_as_it_may_have(project):
    members(project, a=(1, "{units: 1}"), b=(2, "{units: 2}"))
    done = project.here("profile", "--json")
    assert (done.code, done.json["measured"], done.json["known"]) == (0, 3, 0)
    assert measured(project) == [("a", 1), ("b", 1), ("b", 2)]
    assert {point["cores"] for point in done.json["preprocess"]} == {1, 2}


def test_points_that_cannot_change_the_plan_are_left_out(project):
    """Three equal members on two slots: each ends in time on one, and the first shows how they scale."""
    members(project, a=(2, "{units: 1}"), b=(2, "{units: 2}"), c=(2, "{units: 3}"))
    cost = project.here("profile", "--gpus", "2", "--dry-run", "--json").json
    assert (cost["least_points"], cost["points"], cost["nodes"]) == (3, 6, 1)
    assert not project.home.path.exists()
    done = project.here("profile", "--gpus", "2")
    assert "3 to 6 points on 1 node: at most " in done.stderr
    assert measured(project) == [("a", 1), ("a", 2), ("b", 1), ("c", 1)]
    again = project.here("profile", "--gpus", "2", "--json")
    assert (again.code, again.json["measured"], len(local_jobs(project))) == (0, 0, 1)
    assert project.here("profile", "--gpus", "2", "--all", "--json").json["measured"] == 2


def test_jobs_of_spread_points_take_turns_on_one_machine(project):
    members(project, a=(2, "{units: 1}"), b=(2, "{units: 2}"), c=(2, "{units: 3}"))
    done = project.here("profile", "--jobs", "2", "--json")
    assert (done.code, done.json["measured"]) == (0, 6)
    assert len(measured(project)) == 6
    shares = [read_measurements(path) for path in sorted(project.home.profiles.glob("*"))]
    assert sorted(sum(point.gpus for point in share.points) for share in shares) == [4, 5]
    assert [share.preprocess_cores for share in shares] == [(1, 2), ()]
    times = [[e.time for e in read_folder(p)] for p in sorted(project.home.profiles.glob("*/events"))]
    assert max(times[0]) < min(times[1])


@pytest.mark.parametrize("option", ["--jobs", "--max-concurrent"])
def test_less_than_one_job_is_refused(project, option):
    members(project, a=(1, "{}"))
    assert project.here("profile", option, "0").code == 2
    assert not project.home.path.exists()


def test_more_jobs_than_the_site_lets_a_user_queue_are_refused(project):
    members(project, a=(1, "{}"))
    (project.path / "site-configs").mkdir()
    (project.path / "site-configs" / "small.yaml").write_text("extends: local\nmax_queued_jobs: 2\n")
    done = project.here("profile", "--site", "small", "--jobs", "3")
    assert (done.code, "--jobs 3: site small permits 2 queued jobs per user" in done.stderr) == (2, True)
    assert not project.home.path.exists()


def test_more_jobs_than_a_queue_takes_are_refused_and_no_more_than_run_at_a_time_are_submitted(project):
    members(project, a=(1, "{}"), b=(1, "{units: 2}"), c=(1, "{units: 3}"))
    (project.path / "site-configs").mkdir()
    limits = "queues: [{name: local, max_nodes: 1, max_wall: 12h, max_jobs: 3, max_running: 2}]\n"
    (project.path / "site-configs" / "small.yaml").write_text(f"extends: local\n{limits}")
    done = project.here("profile", "--site", "small", "--jobs", "4")
    assert (done.code, "--jobs 4: queue local permits 3 queued jobs" in done.stderr) == (2, True)
    assert project.here("profile", "--site", "small", "--jobs", "3").code == 0
    assert len([*project.home.profiles.iterdir()]) == 2


def test_known_points_are_measured_again_only_when_changed(project):
    members(project, a=(1, "{}"), b=(1, "{units: 2}"))
    project.here("profile")
    again = project.here("profile", "--json")
    assert (again.json["measured"], again.json["known"]) == (0, 2)
    members(project, a=(1, "{}"), b=(1, "{units: 3}"))
    changed = project.here("profile", "--json")
    assert (changed.json["measured"], changed.json["known"]) == (1, 1)
    assert project.here("profile", "--force", "--json").json["measured"] == 2


def test_a_shape_is_measured_on_as_many_gpus_as_any_member_has(project):
    members(project, a=(1, "{lr: 1}"), b=(2, "{lr: 2}"), c=(1, "{units: 2}"))
    done = project.here("profile", "--json")
    assert (done.json["measured"], measured(project)) == (3, [("a", 1), ("a", 2), ("c", 1)])
    members(project, z=(2, "{lr: 3}"), c=(1, "{units: 2}"))
    again = project.here("profile", "--json")
    assert (again.json["measured"], again.json["known"], again.json["stale"]) == (0, 3, [])


def test_earlier_points_of_members_count_until_remeasured(project):
    members(project, a=(1, "{lr: 1}"), b=(1, "{lr: 2}"))
    table = "member,gpus,rate,gpu_type\na,1,7.0,fake\nb,1,8.0,fake\n"
    (project.path / "old.csv").write_text(table)
    assert project.here("profile", "import", "old.csv").code == 0
    assert project.here("profile", "--json").json["measured"] == 0
    assert project.here("profile", "export").stdout == table
    assert project.here("profile", "--force", "--json").json["measured"] == 1
    assert (
        project.here("profile", "export").stdout
        == "member,gpus,rate,gpu_type\na,1,100.0,fake\nb,1,100.0,fake\n"
    )


def test_a_failing_member_stops_no_other_and_shows_its_log(project):
    members(project, bad=(1, "{fail: true}"), good=(1, "{}"))
    done = project.here("profile", "--json")
    assert (done.code, done.error["kind"]) == (5, "members-failed")
    (failure,) = done.json["failures"]
    assert failure["point"] == {"member": "bad", "gpus": 1, "what": "rate", "gpu_type": None}
    assert failure["error"] == "no such layer"
    assert failure["log_tail"] == ["building bad"]
    assert measured(project) == [("good", 1)]
    for_people = project.here("profile")
    assert for_people.code == 5
    assert "bad on 1: no such layer\n    building bad" in for_people.stdout
    assert "1 of 1 points could not be measured (bad)" in for_people.stderr


def test_a_known_point_that_fails_when_forced_is_reported(project):
    members(project, bad=(1, "{fail: true}"))
    (member,) = read_ensemble(project.path / "ensemble.yaml").members
    machine = Hardware("cpu", "none", "none")
    known = ProfilePoint("bad", 1, 50.0, member.fingerprint, 32, 1.0, machine, samples_per_epoch=8)
    with Catalog.open(project.home.catalog) as catalog:
        catalog.save_points("many", "local", [known])
    assert project.here("profile", "--json").code == 0
    again = project.here("profile", "--force", "--json")
    assert (again.code, [failure["point"]["member"] for failure in again.json["failures"]]) == (5, ["bad"])
    assert measured(project) == [("bad", 1)]


def test_the_next_command_finds_the_points_of_a_killed_one(project):
    members(project, quick=(1, "{}"), other=(1, "{measure_s: 3}"))
    process = project.start("profile")
    wait_for(lambda: [e for e in events_below(project) if e.kind == "point"])
    process.kill()
    process.communicate()
    wait_for(lambda: not alive(str(project.path)))
    again = project.here("profile", "--json")
    assert again.code == 0
    assert again.json["known"] >= 1
    assert measured(project) == [("other", 1), ("quick", 1)]


def test_ctrl_c_to_all_processes_of_a_terminal_keeps_measured_points_and_ends_them_all(project):
    members(project, quick=(1, "{}"), slow=(1, f"{{gate: {project.path}/gate}}"))
    process = project.start("profile", prefix=("setsid",))
    wait_for(lambda: [e for e in events_below(project) if e.kind == "point"])
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert measured(project) == [("quick", 1)]
    wait_for(lambda: not alive(str(project.path)))
