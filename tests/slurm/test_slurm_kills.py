"""hetctl killed at many of its steps, and two at once, on a real Slurm: each job is submitted once."""

from __future__ import annotations

import shutil
import sqlite3
import uuid

import pytest
from kills import KILLS, at_once, killed, lines_of, spread
from slurm_cluster import SlurmCluster
from workbench import new_project

from hetctl.app.project import Waits
from hetctl.catalog.catalog import Catalog

pytestmark = pytest.mark.slurm

TWICE = KILLS // 3


@pytest.fixture
def project(slurm_cluster: SlurmCluster, tmp_path):
    lab = slurm_cluster.lab(tmp_path / "project", "timeouts: {lease: 30s}\ndirectives: [--hold]\n")
    made = new_project(tmp_path / "project", environment=lab, waits=Waits(settle_s=0.2))
    assert made.here("profile", "import", "rates.csv").code == 0
    yield made
    for job in names_of(slurm_cluster):
        slurm_cluster.run("scancel", "--name", job)


def names_of(cluster, *states):
    """The names of all jobs that Slurm knows, one for each job."""
    return cluster.run("squeue", "--noheader", "--format=%j", *(states or ("--states=all",))).split()


def jobs(project):
    with Catalog.open(project.home.catalog) as catalog:
        return [job for record in catalog.runs() for job in catalog.jobs(record.spec.run)]


def restore(project, kept):
    """Go back to an earlier state of the project, under an identity that no job has seen yet."""
    shutil.rmtree(project.home.path)
    shutil.copytree(kept, project.home.path)
    with sqlite3.connect(project.home.catalog) as database:
        database.execute("UPDATE project SET identity = ?", [uuid.uuid4().hex])


def kills(project, kept, command):
    """Kill the command at its steps; return what Slurm has after the next command, kill by kill."""
    # Processes that are forked from this one need not import what this imports.
    assert project.here("submit", "--new", "--dry-run").code == 0
    lines = lines_of(project, command)
    for line in spread(lines, KILLS):
        restore(project, kept)
        reached = killed(project, line, command)
        if project.here("advance").code == 2:
            assert project.here("submit").code == 0
        yield reached, jobs(project)


def test_a_submit_killed_at_any_line_leaves_one_job(slurm_cluster, project, tmp_path):
    kept = shutil.copytree(project.home.path, tmp_path / "kept")
    reached = []
    for was_killed, stored in kills(project, kept, "submit"):
        reached.append(was_killed)
        (job,) = stored
        assert job.batch_id.isdigit()
        assert names_of(slurm_cluster).count(job.name) == 1
    assert sum(reached) >= 0.8 * KILLS


def test_an_advance_killed_at_any_line_submits_one_job(slurm_cluster, project, tmp_path):
    assert project.here("submit").code == 0
    (first,) = jobs(project)
    slurm_cluster.run("scancel", first.batch_id)
    kept = shutil.copytree(project.home.path, tmp_path / "kept")
    reached = []
    for was_killed, stored in kills(project, kept, "advance"):
        reached.append(was_killed)
        assert [job.number for job in stored] == [0, 1]
        assert stored[1].batch_id.isdigit()
        assert names_of(slurm_cluster).count(stored[1].name) == 1
    assert sum(reached) >= 0.8 * KILLS


def test_two_submits_at_once(slurm_cluster, project, tmp_path):
    kept = shutil.copytree(project.home.path, tmp_path / "kept")
    for _ in range(TWICE):
        restore(project, kept)
        assert sorted(at_once(project, "submit", "submit")) == [0, 6]
        (job,) = jobs(project)
        assert names_of(slurm_cluster).count(job.name) == 1


def test_two_advances_at_once(slurm_cluster, project, tmp_path):
    assert project.here("submit").code == 0
    slurm_cluster.run("scancel", jobs(project)[0].batch_id)
    kept = shutil.copytree(project.home.path, tmp_path / "kept")
    for _ in range(TWICE):
        restore(project, kept)
        codes = at_once(project, "advance", "advance")
        assert 0 in codes
        assert set(codes) <= {0, 6}
        first, second = jobs(project)
        assert [names_of(slurm_cluster).count(job.name) for job in (first, second)] == [1, 1]


def test_two_cancels_at_once(slurm_cluster, project, tmp_path):
    kept = shutil.copytree(project.home.path, tmp_path / "kept")
    for _ in range(TWICE):
        restore(project, kept)
        assert project.here("submit").code == 0
        codes = at_once(project, "cancel", "cancel")
        assert 0 in codes
        assert set(codes) <= {0, 6}
        (job,) = jobs(project)
        assert job.name not in names_of(slurm_cluster, "--states=pending,running")
        assert project.here("status", "--json").json["state"] == "cancelled"
