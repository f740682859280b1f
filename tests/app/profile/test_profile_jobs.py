"""Profiling jobs: known before they are submitted, found by their name, else withdrawn."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace

import pytest
from kills import killed, lines_of, spread
from profiles import MODULE, measurings, members, profiling_project
from workbench import alive, wait_for

from hetctl.app.profile.jobs import (
    SHORTEST_JOB_S,
    START_PATIENCE_S,
    MeasureRequest,
    groups_under_way,
    ingest_all,
    open_groups,
    submit,
    unread_folders,
)
from hetctl.app.project import Waits
from hetctl.catalog.catalog import Catalog
from hetctl.cluster.batch.base import SubmissionInDoubtError
from hetctl.cluster.batch.submitit_jobs import has_result
from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BatchSystemError
from hetctl.model.job import JobState, JobStatus
from hetctl.model.site import Queue, Site
from hetctl.storage.event_files import EventWriter
from hetctl.storage.profile_request import ProfileTarget, measurements_file, read_jobs

KILLS = 6
SITE = Site("lab", "local", "local", 1, 2, 2, 2**30, (Queue("main", max_wall_s=3600),), device="slot")
SHARES = ((ProfileTarget("a", 1),), (ProfileTarget("b", 1), ProfileTarget("b", 2)))


class Batch:
    """A batch system that has the jobs it is told to have."""

    def __init__(self, found=(), states=None, error=None):
        self.found, self.states, self.error = list(found), states or {}, error
        self.asked = []

    def call(self, call):
        if self.error:
            raise self.error
        return tuple(f"7_{index}" for index in range(len(call.arguments)))

    def statuses(self, ids):
        self.asked.append(list(ids))
        return {job: JobStatus(self.states.get(job, JobState.RUNNING)) for job in ids}

    def find_call(self, _name, count):
        return self.found.pop(0) if self.found else ("",) * count


@pytest.fixture
def ensemble(tmp_path) -> Ensemble:
    path = tmp_path / "ensemble.yaml"
    (tmp_path / "nets.py").write_text(MODULE)
    path.write_text(
        "name: pair\nframework: tensorflow\nfunctions: {input_fn: nets:input_fn, model_fn: nets:model_fn}\n"
        "members: [{name: a, config: {}}, {name: b, config: {}}]\n"
    )
    return read_ensemble(path)


@pytest.fixture
def profiles(tmp_path):
    return tmp_path / "profiles"


@pytest.fixture
def catalog(tmp_path):
    with Catalog.open(tmp_path / "catalog.db") as catalog:
        yield catalog


def request(ensemble):
    return MeasureRequest(ensemble, SITE, SITE.queues[0], SHARES, (1, 2), None)


def cut_short(profiles, ensemble):
    """Submit such that nobody knows whether there is a job."""
    with pytest.raises(SubmissionInDoubtError):
        submit(Batch(error=SubmissionInDoubtError("no answer")), profiles, request(ensemble))
    (group,) = open_groups(profiles)
    return group


def look(batch, catalog, profiles):
    return groups_under_way(batch, catalog, profiles, "pair", "lab", settle_s=0.0)


def test_ids_are_kept_and_the_batch_system_is_asked_once(profiles, ensemble, catalog):
    first = submit(Batch(), profiles, request(ensemble))
    second = submit(Batch(), profiles, request(ensemble))
    batch = Batch()
    groups = look(batch, catalog, profiles)
    assert [group.ids for group in groups] == [["7_0", "7_1"]] * 2
    assert batch.asked == [["7_0", "7_1"] * 2]
    assert {group.record.name for group in groups} == {first.record.name, second.record.name}
    assert all(path.stat().st_mode & 0o077 == 0 for path in profiles.rglob("*"))


@pytest.mark.parametrize("given_s", [None, 240, 7200])
def test_the_limit_of_a_job_is_the_given_one(profiles, ensemble, given_s):
    group = submit(Batch(), profiles, replace(request(ensemble), given_wall_s=given_s))
    assert {job.wall_s for job in group.jobs} == {given_s or SHORTEST_JOB_S}


def test_jobs_of_another_site_are_not_asked_about(profiles, ensemble, catalog):
    submit(Batch(), profiles, request(ensemble))
    batch = Batch()
    assert groups_under_way(batch, catalog, profiles, "pair", "elsewhere", settle_s=0.0) == []
    assert batch.asked == [[]]
    assert len(open_groups(profiles)) == 1


def test_a_group_whose_jobs_are_over_is_closed_and_read_no_more(profiles, ensemble, catalog):
    group = submit(Batch(), profiles, request(ensemble))
    assert unread_folders(profiles) == list(group.folders)
    one_alive = {"7_0": JobState.FAILED, "7_1": JobState.RUNNING}
    assert len(look(Batch(states=one_alive), catalog, profiles)) == 1
    assert look(Batch(states=dict.fromkeys(one_alive, JobState.FAILED)), catalog, profiles) == []
    assert (open_groups(profiles), unread_folders(profiles)) == ([], [])


def test_a_refused_submission_is_not_looked_for(profiles, ensemble):
    with pytest.raises(BatchSystemError, match="no such partition"):
        submit(Batch(error=BatchSystemError("no such partition")), profiles, request(ensemble))
    assert (open_groups(profiles), unread_folders(profiles)) == ([], [])


def test_jobs_found_by_name_after_a_crash_get_their_call(profiles, ensemble, catalog):
    group = cut_short(profiles, ensemble)
    (found,) = look(Batch(found=[("", ""), ("7_0", "7_1")]), catalog, profiles)
    assert found.record.name == group.record.name
    assert read_jobs(group.folders[0]).ids == ("7_0", "7_1")
    assert sorted(path.name for path in group.calls.iterdir()) == ["7_0_submitted.pkl", "7_1_submitted.pkl"]


@pytest.mark.parametrize("found", [("", ""), ("7_0", "")])
def test_a_missing_job_has_nothing_to_measure_if_it_comes_late(profiles, ensemble, catalog, found):
    group = cut_short(profiles, ensemble)
    groups = look(Batch(found=[found, found]), catalog, profiles)
    assert [job for group in groups for job in group.ids] == [job for job in found if job]
    assert [measurements_file(folder).exists() for folder in group.folders] == [bool(job) for job in found]
    assert bool(open_groups(profiles)) == any(found)


def test_a_crash_before_the_measurements_file_leaves_nothing(profiles, ensemble, catalog):
    group = cut_short(profiles, ensemble)
    for folder in group.folders:
        measurements_file(folder).unlink()
    shutil.rmtree(group.folders[1])
    ingest_all(catalog, profiles)
    assert look(Batch(), catalog, profiles) == []


@pytest.mark.parametrize(("started", "patience"), [(False, START_PATIENCE_S), (True, 600)])
def test_a_forgotten_job_is_followed_until_its_limit_at_most(profiles, ensemble, started, patience):
    job = submit(Batch(), profiles, request(ensemble)).jobs[0]
    if started:
        (job.folder / "events").mkdir()
        EventWriter(job.folder / "events", "a-1").write("failed", error="x")
    now = time.time()
    unknown = JobStatus(JobState.UNKNOWN)
    assert not job.is_over(unknown, now + patience - 5)
    assert job.is_over(unknown, now + patience + 5)
    assert not job.is_over(JobStatus(JobState.RUNNING), now + patience + 5)


def test_a_group_that_has_returned_is_closed_without_a_question(profiles, ensemble, catalog):
    group = submit(Batch(), profiles, request(ensemble))
    group.calls.mkdir()
    for job in group.jobs:
        ingest_all(catalog, profiles)
        assert len(open_groups(profiles)) == 1
        (group.calls / f"{job.id}_0_result.pkl").touch()
        assert has_result(group.calls, job.id)
    ingest_all(catalog, profiles)
    assert open_groups(profiles) == []


def test_killed_at_any_step_of_its_submission(tmp_path, monkeypatch):
    """No point is measured twice, none is lost: the next command finds the jobs, or submits them."""
    project = replace(profiling_project(tmp_path), waits=Waits(settle_s=0.5))
    monkeypatch.setattr(sys, "executable", str(project.python))
    members(project, a=(1, "{}"), b=(1, "{measure_s: 0.5}"))
    lines = lines_of(project, "profile", "--jobs", "2")
    reached = 0
    for line in spread(lines, KILLS):
        shutil.rmtree(project.home.path)
        reached += killed(project, line, "profile", "--jobs", "2")
        again = project.here("profile", "--jobs", "2", "--json")
        assert (again.code, len(again.json["points"])) == (0, 2), again.stdout
        wait_for(lambda: not alive(str(project.path)))
        assert measurings(project) == ["a-1", "b-1"], line
    assert reached >= KILLS - 2
