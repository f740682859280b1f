"""Profiling jobs: known before they are submitted, found by their name, else withdrawn."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace

import pytest
from kills import KILLS, killed, lines_of, spread
from profiles import MODULE, measurings, members, profiling_project
from workbench import alive, wait_for

from hetctl.app.profile.jobs import (
    SHORTEST_JOB_S,
    START_PATIENCE_S,
    ProfileCommand,
    groups_under_way,
    ingest_all,
    open_groups,
    submit,
    unread_folders,
)
from hetctl.app.project import Project, Waits
from hetctl.catalog.catalog import Catalog
from hetctl.cluster.batch.base import SubmissionInDoubtError
from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BatchSystemError
from hetctl.model.job import JobSize, JobState, JobStatus
from hetctl.model.site import Queue, Site
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import Home
from hetctl.storage.profile_request import ProfileTarget, ended_file, measurements_file, read_jobs

FEW = KILLS // 3
SITE = Site("lab", "local", "local", 1, 2, 2, 2**30, (Queue("main", max_wall_s=3600),), device="slot")
POINTS = (ProfileTarget("a", 1), ProfileTarget("b", 1), ProfileTarget("b", 2))


class Batch:
    """A batch system that has the jobs it is told to have."""

    def __init__(self, found=(), states=None, error=None, accepted=0):
        self.found, self.states, self.error, self.accepted = list(found), states or {}, error, accepted
        self.asked, self.requests, self.cancelled = [], [], []

    def submit(self, request):
        if self.error and len(self.requests) == self.accepted:
            raise self.error
        self.requests.append(request)
        return str(6 + len(self.requests))

    def statuses(self, ids):
        self.asked.append(list(ids))
        return {job: JobStatus(self.states.get(job, JobState.RUNNING)) for job in ids}

    def find(self, names):
        ids = self.found.pop(0) if self.found else ()
        return {name: job for name, job in zip(names, ids, strict=False) if job}

    def cancel(self, ids):
        self.cancelled += ids


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
def project(tmp_path):
    return Project(tmp_path, Home(tmp_path), Waits(settle_s=0.0))


@pytest.fixture
def profiles(project):
    return project.home.profiles


@pytest.fixture
def catalog(tmp_path):
    with Catalog.open(tmp_path / "catalog.db") as catalog:
        yield catalog


def submit_jobs(project, batch, ensemble, **options):
    """Submit two jobs."""
    command = ProfileCommand(ensemble, SITE, JobSize(SITE.queues[0], 2, 1, 600, 60), 2, **options)
    return submit(project, batch, command, POINTS, (1, 2))


def cut_short(project, ensemble):
    """Submit such that nobody knows whether there is a job."""
    with pytest.raises(SubmissionInDoubtError):
        submit_jobs(project, Batch(error=SubmissionInDoubtError("no answer")), ensemble)
    (group,) = open_groups(project.home.profiles)
    return group


def look(batch, catalog, profiles):
    return groups_under_way(batch, catalog, profiles, "pair", "lab", settle_s=0.0)


def test_ids_are_kept_and_the_batch_system_is_asked_once(project, profiles, ensemble, catalog):
    first = submit_jobs(project, Batch(), ensemble)
    second = submit_jobs(project, Batch(), ensemble)
    batch = Batch()
    groups = look(batch, catalog, profiles)
    assert [group.ids for group in groups] == [["7", "8"]] * 2
    assert batch.asked == [["7", "8"] * 2]
    assert {group.record.name for group in groups} == {first.record.name, second.record.name}
    assert all(path.stat().st_mode & 0o077 == 0 for path in profiles.rglob("*"))


@pytest.mark.parametrize("given_s", [None, 240, 7200])
def test_the_limit_of_a_job_is_the_given_one(project, ensemble, given_s):
    group = submit_jobs(project, Batch(), ensemble, wall_s=given_s)
    assert {job.wall_s for job in group.jobs} == {given_s or SHORTEST_JOB_S}


@pytest.mark.parametrize(("most", "after"), [(None, None), (1, "7"), (2, None)])
def test_a_job_waits_while_too_many_others_run(project, ensemble, most, after):
    batch = Batch()
    group = submit_jobs(project, batch, ensemble, max_concurrent=most)
    assert [job.after for job in batch.requests] == [None, after]
    assert [job.name for job in batch.requests] == list(group.record.names)
    assert all("--mode profile" in job.script.read_text() for job in batch.requests)


def test_a_doubt_that_the_batch_system_clears_is_none(project, ensemble):
    doubt = Batch(found=[("9",)], error=SubmissionInDoubtError("no answer"), accepted=1)
    assert submit_jobs(project, doubt, ensemble).ids == ["7", "9"]


def test_jobs_of_another_site_are_not_asked_about(project, profiles, ensemble, catalog):
    submit_jobs(project, Batch(), ensemble)
    batch = Batch()
    assert groups_under_way(batch, catalog, profiles, "pair", "elsewhere", settle_s=0.0) == []
    assert batch.asked == [[]]
    assert len(open_groups(profiles)) == 1


def test_a_group_whose_jobs_are_over_is_closed_and_read_no_more(project, profiles, ensemble, catalog):
    group = submit_jobs(project, Batch(), ensemble)
    assert unread_folders(profiles) == list(group.folders)
    one_alive = {"7": JobState.FAILED, "8": JobState.RUNNING}
    assert len(look(Batch(states=one_alive), catalog, profiles)) == 1
    assert look(Batch(states=dict.fromkeys(one_alive, JobState.FAILED)), catalog, profiles) == []
    assert (open_groups(profiles), unread_folders(profiles)) == ([], [])


@pytest.mark.parametrize("accepted", [0, 1])
def test_a_refused_submission_is_not_looked_for(project, profiles, ensemble, accepted):
    batch = Batch(error=BatchSystemError("no such partition"), accepted=accepted)
    with pytest.raises(BatchSystemError, match="no such partition"):
        submit_jobs(project, batch, ensemble)
    assert (open_groups(profiles), unread_folders(profiles)) == ([], [])
    assert batch.cancelled == ["7"] * accepted


def test_jobs_found_by_name_after_a_crash_are_adopted(project, profiles, ensemble, catalog):
    group = cut_short(project, ensemble)
    (found,) = look(Batch(found=[("", ""), ("7", "8")]), catalog, profiles)
    assert found.record.name == group.record.name
    assert read_jobs(group.folders[0]).ids == ("7", "8")


@pytest.mark.parametrize("found", [("", ""), ("7", "")])
def test_a_missing_job_has_nothing_to_measure_if_it_comes_late(project, profiles, ensemble, catalog, found):
    group = cut_short(project, ensemble)
    groups = look(Batch(found=[found, found]), catalog, profiles)
    assert [job for group in groups for job in group.ids] == [job for job in found if job]
    assert [measurements_file(folder).exists() for folder in group.folders] == [bool(job) for job in found]
    assert bool(open_groups(profiles)) == any(found)


def test_a_crash_before_the_measurements_file_leaves_nothing(project, profiles, ensemble, catalog):
    group = cut_short(project, ensemble)
    measurements_file(group.folders[0]).unlink()
    assert not group.folders[1].exists()
    ingest_all(catalog, profiles)
    assert look(Batch(), catalog, profiles) == []


@pytest.mark.parametrize(("started", "patience"), [(False, START_PATIENCE_S), (True, 600)])
def test_a_forgotten_job_is_followed_until_its_limit_at_most(project, ensemble, started, patience):
    job = submit_jobs(project, Batch(), ensemble).jobs[0]
    if started:
        (job.folder / "events").mkdir()
        EventWriter(job.folder / "events", "a-1").write("failed", error="x")
    now = time.time()
    unknown = JobStatus(JobState.UNKNOWN)
    assert not job.is_over(unknown, now + patience - 5)
    assert job.is_over(unknown, now + patience + 5)
    assert not job.is_over(JobStatus(JobState.RUNNING), now + patience + 5)


def test_a_group_that_has_returned_is_closed_without_a_question(project, profiles, ensemble, catalog):
    group = submit_jobs(project, Batch(), ensemble)
    for job in group.jobs:
        ingest_all(catalog, profiles)
        assert len(open_groups(profiles)) == 1
        ended_file(job.folder).touch()
    ingest_all(catalog, profiles)
    assert open_groups(profiles) == []


def test_killed_at_any_step_of_its_submission(tmp_path):
    """No point is measured twice, none is lost: the next command finds the jobs, or submits them."""
    project = replace(profiling_project(tmp_path), waits=Waits(settle_s=0.5))
    members(project, a=(1, "{}"), b=(1, "{measure_s: 0.5}"))
    lines = lines_of(project, "profile", "--jobs", "2")
    reached = 0
    for line in spread(lines, FEW):
        shutil.rmtree(project.home.path)
        reached += killed(project, line, "profile", "--jobs", "2")
        again = project.here("profile", "--jobs", "2", "--json")
        assert (again.code, len(again.json["points"])) == (0, 2), again.stdout
        wait_for(lambda: not alive(str(project.path)))
        assert measurings(project) == ["a-1", "b-1"], line
    assert reached >= FEW - 1
