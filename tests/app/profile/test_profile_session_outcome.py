"""What is known of rates: the catalog's points, and those that are on the disk alone."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from profiles import local_jobs, members, profiling_project

from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.inputs.site_file import find_site
from hetctl.model.errors import BatchSystemError
from hetctl.model.profile import Hardware, PreprocessPoint, ProfilePoint
from hetctl.model.serialization import encode
from hetctl.storage.event_files import EventWriter
from hetctl.storage.profile_request import (
    Measurements,
    ProfileJobs,
    ProfileTarget,
    write_jobs,
    write_measurements,
)

OLD = 1000.0


@pytest.fixture
def project(tmp_path):
    made = profiling_project(tmp_path)
    members(made, a=(2, "{}"))
    made.ensemble = read_ensemble(made.path / "ensemble.yaml")
    made.site = find_site("local", project=made.path, home=tmp_path)
    with Catalog.open(made.home.catalog) as catalog:
        catalog.save_points("many", "local", [point(made, 1, OLD, 10.0)])
        catalog.save_points("many", "local", [PreprocessPoint(1, 5.0)])
    return made


def point(project, gpus, at, rate):
    (member,) = project.ensemble.members
    machine = Hardware("cpu", "none", "none")
    return ProfilePoint("a", gpus, rate, member.fingerprint, 32, at, machine, samples_per_epoch=8)


def leave_job(project, *points, cores=(), name="t-0", **record):
    """Write what a job leaves that is for two points and has measured some."""
    folder = project.home.profiles / name
    (folder / "events").mkdir(parents=True)
    wanted = Measurements(
        project.ensemble, project.site, (ProfileTarget("a", 1), ProfileTarget("a", 2)), (1, 2)
    )
    write_measurements(folder, wanted)
    for one in points:
        EventWriter(folder / "events", f"a-{one.gpus}").write("point", **encode(one))
    for number in cores:
        EventWriter(folder / "events", "preprocess").write("preprocess", cores=number, rate=7.0)
    jobs = ProfileJobs("hetctl-profile-many-t", "many", "local", (name,), 600, time.time())
    write_jobs(folder, replace(jobs, **record))
    return folder


def show(project):
    return project.here("profile", "show", "--json").json


def test_the_newest_point_of_disk_and_catalog_is_shown(project):
    leave_job(project, point(project, 1, OLD - 1, 1.0), point(project, 2, OLD, 20.0), cores=(2,), ids=("x",))
    before = project.tree()
    shown = show(project)
    assert [(p["gpus"], p["rate"]) for p in shown["points"]] == [(1, 10.0), (2, 20.0)]
    assert shown["known"] == 2
    assert shown["preprocess"] == [{"cores": 1, "rate": 5.0}, {"cores": 2, "rate": 7.0}]
    assert project.tree() == before


def test_points_of_an_edited_member_stand_beside_the_older_ones(project):
    other = replace(point(project, 1, OLD + 1, 30.0), fingerprint="other")
    leave_job(project, other, ids=("x",))
    assert [p["rate"] for p in show(project)["points"]] == [10.0, 30.0]


def test_a_job_whose_submission_is_in_doubt_is_named(project):
    leave_job(project)
    (job,) = show(project)["under_way"]
    assert (job["job"], job["state"]) == ("hetctl-profile-many-t", "submitting")
    assert (job["points"], job["measured"]) == (2, 0)


def test_a_batch_system_that_does_not_answer_is_no_failure(project, monkeypatch):
    leave_job(project, point(project, 2, OLD, 20.0), ids=("4711",))

    class Away:
        def statuses(self, _ids):
            raise BatchSystemError("squeue failed (1): Unable to contact slurm controller")

    monkeypatch.setattr(Project, "batch_system", lambda _project, _site: Away())
    (job,) = show(project)["under_way"]
    assert (job["job"], job["state"], job["measured"]) == ("4711", "unknown", 1)
    text = project.here("profile", "show").stdout
    assert "job 4711 (unknown: squeue failed (1): Unable to contact slurm controller)" in text


def test_ended_jobs_and_those_of_other_sites_are_not_under_way(project):
    leave_job(project, name="u-0", ids=("x",), over=True)
    leave_job(project, name="v-0", ids=("x",), site="elsewhere")
    assert show(project)["under_way"] == []
    assert local_jobs(project) == []
