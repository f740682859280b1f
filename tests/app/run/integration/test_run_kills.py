"""hetctl killed at many of its steps: the next command finds the job, or submits it; never two."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal

import pytest
from kills import KILLS, killed, lines_of, spread
from workbench import alive, pretending, pretending_project, wait_for

from hetctl.app.project import Waits
from hetctl.catalog.catalog import Catalog

FEW = KILLS // 2
LONG = pretending(**dict.fromkeys("abc", "{epochs: 500}"))


@pytest.fixture
def project(tmp_path):
    made = pretending_project(tmp_path, LONG, waits=Waits(settle_s=0.2))
    assert made.here("profile", "import", "rates.csv").code == 0
    yield made
    end_jobs(made)


def end_jobs(project):
    """Kill all that runs for a project, and what starts meanwhile."""

    def none_left():
        pids = alive(str(project.path))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(pid), signal.SIGKILL)
        return not pids

    wait_for(none_left)


def jobs(project):
    with Catalog.open(project.home.catalog) as catalog:
        return [job for record in catalog.runs() for job in catalog.jobs(record.spec.run)]


def supervisors(project):
    """Processes that hold a job, by the words of their command lines."""
    return [pid for pid in alive("hetctl.cluster.batch.supervisor") if pid in set(alive(str(project.path)))]


def restore(project, kept):
    end_jobs(project)
    project.check_runs()
    shutil.rmtree(project.home.path)
    shutil.copytree(kept, project.home.path)


def test_a_submit_killed_at_any_line_leaves_one_job(project, tmp_path):
    kept = shutil.copytree(project.home.path, tmp_path / "kept")
    lines = lines_of(project, "submit")
    reached = 0
    for line in spread(lines, FEW):
        restore(project, kept)
        reached += killed(project, line, "submit")
        if project.here("advance").code == 2:
            assert project.here("submit").code == 0
        (job,) = jobs(project)
        assert job.batch_id
        wait_for(lambda: len(supervisors(project)) == 1)
        project.check_runs()
    assert reached >= FEW - 1


def test_an_advance_killed_at_any_line_submits_one_job(project, tmp_path):
    assert project.here("submit").code == 0
    wait_for(project.epochs)
    end_jobs(project)
    kept = shutil.copytree(project.home.path, tmp_path / "kept")
    lines = lines_of(project, "advance")
    reached = 0
    for line in spread(lines, FEW):
        restore(project, kept)
        reached += killed(project, line, "advance")
        assert project.here("advance").code == 0
        assert [job.number for job in jobs(project)] == [0, 1]
        assert jobs(project)[1].batch_id
        wait_for(lambda: len(supervisors(project)) == 1)
        project.check_runs()
    assert reached >= FEW - 1
