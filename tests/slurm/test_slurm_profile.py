"""Profiling through real Slurm jobs, with measurements that only pretend to measure."""

import itertools
import shutil
from dataclasses import replace

import pytest
from kills import KILLS, killed, lines_of, spread
from profiles import measurings
from workbench import TIMEOUT_S, pretending_project, wait_for

from hetctl.storage.event_files import read_folder
from hetctl.storage.profile_request import read_jobs, read_measurements, write_jobs

pytestmark = pytest.mark.slurm

FEW = KILLS // 4

ENSEMBLE = """\
name: array
framework: pytorch
functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}
members:
  - {name: a, max_gpus: 2, config: {}}
  - {name: b, max_gpus: 2, config: {measure_s: 0.5}}
  - {name: c, max_gpus: 2, config: {fail: true}}
"""


@pytest.fixture
def project(tmp_path, slurm_cluster):
    return pretending_project(tmp_path, ENSEMBLE, environment=slurm_cluster.lab(tmp_path / "project"))


def test_points_are_measured_by_several_jobs_in_turn(project, slurm_cluster):
    done = project.here("profile", "--jobs", "3", "--max-concurrent", "1", "--json")
    assert done.code == 5
    assert sorted((p["member"], p["gpus"]) for p in done.json["points"]) == [
        ("a", 1), ("a", 2), ("b", 1), ("b", 2),
    ]  # fmt: skip
    assert {failure["point"]["member"] for failure in done.json["failures"]} == {"c"}
    folders = sorted(project.home.profiles.iterdir())
    assert [len(read_measurements(folder).points) for folder in folders] == [2, 2, 2]
    spans = sorted(
        (min(times), max(times))
        for times in ([event.time for event in read_folder(f / "events")] for f in folders)
    )
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))
    files = [path for folder in folders for path in folder.rglob("*")]
    assert [path.name for path in files].count("ended") == 3
    assert len([path for path in files if path.match("submitit/*_submission.sh")]) == 3
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    names = slurm_cluster.run("squeue", "--noheader", "--states=all", "--format=%j").split()
    assert [name.startswith("hetctl-profile-array-") for name in names].count(True) == 3


def names_of(cluster):
    """The names of all jobs of this ensemble that Slurm knows."""
    names = cluster.run("squeue", "--noheader", "--states=all", "--format=%j").split()
    return [name for name in names if name.startswith("hetctl-profile-adopted-")]


def test_the_next_command_follows_jobs_left_measuring(project, slurm_cluster):
    """The command was killed before it could note the ids."""
    slow = ENSEMBLE.replace("name: array", "name: adopted").replace("{fail: true}", "{measure_s: 8}")
    (project.path / "ensemble.yaml").write_text(slow)
    before = len(names_of(slurm_cluster))
    process = project.start("profile", "--jobs", "2")
    wait_for(lambda: measurings(project), TIMEOUT_S)
    process.kill()
    process.communicate(timeout=TIMEOUT_S)
    (path,) = project.home.profiles.glob("*/jobs.json")
    write_jobs(path.parent, replace(read_jobs(path.parent), ids=()))
    again = project.here("profile", "--json")
    assert (again.code, len(again.json["points"])) == (0, 6)
    ids = read_jobs(path.parent).ids
    assert f"jobs {', '.join(ids)} measure" in again.stderr
    assert measurings(project) == ["a-1", "a-2", "b-1", "b-2", "c-1", "c-2"]
    assert len(names_of(slurm_cluster)) - before == 2


def test_killed_at_any_step_of_its_submission(project):
    """No point is measured twice, none is lost, also where sbatch outlives the command."""
    text = "name: killed\n" + ENSEMBLE.partition("\n")[2].replace("{fail: true}", "{units: 3}")
    (project.path / "ensemble.yaml").write_text(text)
    lines = lines_of(project, "profile", "--all")
    reached = 0
    for line in spread(lines, FEW):
        shutil.rmtree(project.home.path)
        reached += killed(project, line, "profile", "--all")
        again = project.here("profile", "--all", "--json")
        assert (again.code, len(again.json["points"])) == (0, 6), again.stdout
        assert measurings(project) == ["a-1", "a-2", "b-1", "b-2", "c-1", "c-2"], line
    assert reached >= FEW - 1


def test_links_are_measured_within_and_between_nodes(project):
    with (project.path / "site-configs" / "lab.yaml").open("a") as site:
        site.write("device: slot\n")  # else each rank would import the framework, for its memory
    done = project.here("profile", "--links", "--gpus", "4", "--json")
    assert done.code == 0, done.stdout
    nodes = {link["link"]: link["nodes"] for link in done.json["links"]}
    assert len(set(nodes["intra-node"])) == 1
    assert len(set(nodes["inter-node"])) == 2
    assert project.here("profile", "--links", "--gpus", "4", "--json").json["measured"] == 0
