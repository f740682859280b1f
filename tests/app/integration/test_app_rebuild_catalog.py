"""A project whose catalog is lost or damaged while a run goes on: nothing is lost, or submitted twice."""

from __future__ import annotations

import shutil
import sqlite3

import pytest
from workbench import alive, kill_all, new_project, pretending, pretending_project, wait_for

from hetctl.app.project import Waits
from hetctl.catalog.catalog import Catalog
from hetctl.model.serialization import encode
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import Home
from hetctl.storage.profile_request import (
    Measurements,
    ProfileJobs,
    ProfileTarget,
    write_jobs,
    write_measurements,
)


@pytest.fixture
def project(tmp_path):
    """A project with a run: one job trains, and a second one waits behind it."""
    held = f"{{epochs: 3, held_after: 2, until: {tmp_path}/released}}"
    ensemble = pretending(**dict.fromkeys("abc", held))
    made = pretending_project(tmp_path, ensemble, waits=Waits(settle_s=0.2))
    assert made.here("profile", "import", "rates.csv").code == 0
    assert made.here("submit", "--chain").code == 0
    # The job's script enters the second job before it submits it.
    wait_for(lambda: [state for *_, state in jobs_of(made)] == ["running", "pending"] and made.epochs())
    yield made
    kill_all(str(made.path))


def jobs_of(project):
    return [
        (job["number"], job["batch_id"], job["state"])
        for job in project.here("status", "--json").json["jobs"]
    ]


def destroy(home: Home) -> None:
    """Overwrite all but the first page of the catalog."""
    with home.catalog.open("r+b") as file:
        file.seek(4096)
        file.write(b"x" * (home.catalog.stat().st_size - 4096))


def supervisors(project):
    return [pid for pid in alive("hetctl.cluster.batch.supervisor") if pid in alive(str(project.path))]


def points(project):
    with Catalog.open_to_read(project.home.catalog) as catalog:
        return catalog.points("trio", "local")


def test_a_run_goes_on_without_its_catalog(project, tmp_path):
    before, measured = jobs_of(project), points(project)
    project.home.catalog.unlink()
    for command in ("status", "cancel", "submit", "advance", "profile"):
        refused = project.here(command)
        assert (refused.code, "hetctl catalog rebuild" in refused.stderr) == (2, True)
    assert not project.home.catalog.exists()
    done = project.here("catalog", "rebuild", "--json")
    assert (done.code, done.json["runs"]) == (0, ["trio-001"])
    assert (jobs_of(project), points(project)) == (before, measured)
    assert project.here("advance").code == 0
    assert project.here("submit").code == 6
    assert len(supervisors(project)) == 2
    # Now nobody is there to rebuild it but the job itself.
    destroy(project.home)
    assert project.here("status").code == 2
    (tmp_path / "released").touch()
    wait_for(lambda: project.home.damaged_catalog.exists())
    wait_for(lambda: project.here("status", "--json").json["state"] == "finished")
    assert "it is rebuilt" in project.home.run("trio-001").job(0).log.read_text()
    assert project.epochs() == {name: [1, 2, 3] for name in "abc"}
    assert [number for number, *_ in jobs_of(project)] == [0, 1]


def test_a_run_without_a_record_is_rebuilt_from_its_other_files(project):
    before = jobs_of(project)
    project.home.catalog.unlink()
    project.home.run("trio-001").record.unlink()
    assert project.here("catalog", "rebuild").code == 0
    # The job that waits has written nothing yet: the next command finds it by its name.
    assert [number for number, *_ in jobs_of(project)] == [0, 1]
    assert project.here("advance").code == 0
    assert jobs_of(project) == before
    assert project.here("cancel").code == 0
    wait_for(lambda: not supervisors(project))


def test_measured_points_outlive_the_catalog_and_its_backups(tmp_path):
    project = new_project(tmp_path / "project", environment={"HETCTL_SITE": "local"})
    assert project.here("profile", "import", "rates.csv").code == 0
    with Catalog.open_to_read(project.home.catalog) as catalog:
        ensemble, (point, *_) = catalog.ensemble("trio"), catalog.points("trio", "local")
        site = catalog.site("local")
    folder = project.home.profiles / "abc-0"
    make_private_folder(folder / "events")
    write_measurements(folder, Measurements(ensemble, site, (ProfileTarget("a", 1),), ()))
    # Its measurements were in the catalog, so that no command reads them any more.
    write_jobs(folder, ProfileJobs("abc", "trio", "local", ("abc-0",), 60, 1.0, ("1",), over=True))
    EventWriter(folder / "events", "a-1").write("point", **encode(point))
    project.home.catalog.write_bytes(b"")
    shutil.rmtree(project.home.backups)
    done = project.here("catalog", "rebuild", "--json").json
    assert (done["runs"], done["profiles"]) == ([], 1)
    assert points(project) == [point]
    assert project.home.catalog.stat().st_mode & 0o777 == 0o600


def test_damaged_files_of_profiling_jobs_are_named_and_left_out(tmp_path):
    project = new_project(tmp_path / "project", environment={"HETCTL_SITE": "local"})
    assert project.here("profile", "import", "rates.csv").code == 0
    folder = project.home.profiles / "abc-0"
    make_private_folder(folder)
    for name in ("jobs.json", "measurements.json"):
        (folder / name).write_text("{")
    refused = project.here("profile", "--json")
    assert (refused.code, refused.error["kind"]) == (2, "bad-input")
    assert "jobs.json is damaged" in refused.error["message"]
    assert "delete it" in refused.error["hint"]
    done = project.here("catalog", "rebuild", "--json")
    assert (done.code, done.json["profiles"]) == (0, 0)


def test_a_catalog_of_a_newer_version_is_not_rebuilt(tmp_path):
    project = new_project(tmp_path / "project", environment={"HETCTL_SITE": "local"})
    assert project.here("profile", "import", "rates.csv").code == 0
    with sqlite3.connect(project.home.catalog) as database:
        database.execute("UPDATE alembic_version SET version_num = '0099'")
    before = project.home.catalog.read_bytes()
    refused = project.here("catalog", "rebuild")
    assert (refused.code, "upgrade hetctl" in refused.stderr) == (2, True)
    assert project.home.catalog.read_bytes() == before
