"""A run has three files a member and four a job, whatever the number of its rounds."""

from __future__ import annotations

from collections import Counter

import pytest
from machine_speed import scaled
from workbench import alive, pretending_project, wait_for

MEMBERS = "abcdef"
ENSEMBLE = """\
name: six
framework: tensorflow
functions: {{input_fn: nets:input_fn, model_fn: nets:model_fn}}
stop: {{metric: val_accuracy, mode: max, patience: 50, max_epochs: 60}}
members:
{members}"""
MEMBER = "  - {{name: {name}, max_gpus: 2, config: {{epochs: {epochs}, epoch_s: {epoch_s}}}}}\n"
RUN = "six-001"
OF_RUN = {"run.json", "driver.lease", "record.json", "events", "logs", "events/driver.jsonl", "modules"}
AT_TIMES = {"planner.json", "results.jsonl", "state.jsonl"}
JOB_FILES, MEMBER_FILES = 4, 3


@pytest.fixture
def start(tmp_path):
    """Make a project of six members that train so many epochs each, of `epoch_s` seconds."""
    made = []

    def make(name, epochs, epoch_s):
        lines = zip(MEMBERS, epochs, strict=True)
        members = "".join(MEMBER.format(name=m, epochs=count, epoch_s=epoch_s) for m, count in lines)
        (tmp_path / name).mkdir()
        project = pretending_project(tmp_path / name, ENSEMBLE.format(members=members))
        rates = (f"{m},{gpus},{80 * gpus + 20},400\n" for m in MEMBERS for gpus in (1, 2))
        (project.path / "rates.csv").write_text("member,gpus,rate,samples\n" + "".join(rates))
        assert project.here("profile", "import", "rates.csv").code == 0
        made.append(project)
        return project

    yield make
    for project in made:
        project.here("cancel")
        wait_for(lambda project=project: not alive(str(project.path)))


def finish(project, *arguments):
    """Submit a run; return its status when nothing of it is left that runs."""
    assert project.here("submit", "--gpus", "2", *arguments).code == 0
    wait_for(project.is_over, seconds=240)
    wait_for(lambda: not alive(str(project.path)))
    assert project.here("advance").code == 0
    return project.here("status", "--json").json


def counted(project):
    """Count what a run has: of each member, of each job, and of itself."""
    folder = project.home.run(RUN).path
    counts = Counter()
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if name.startswith("modules/"):
            counts["modules"] += 1
        elif name.startswith("job-"):
            counts[int(name[4:8])] += 1
        elif path.stem in MEMBERS:
            counts[path.stem] += 1
        else:
            counts["run"] += 1
            assert name in OF_RUN | AT_TIMES
    return counts


def test_an_elastic_run_of_several_jobs_has_few_files(start):
    project = start("long", [8] * len(MEMBERS), scaled(0.4))
    # The last 10 s of a job are its grace.
    status = finish(project, "--planner", "doubling", "--time", f"{10 + scaled(6):.0f}s")
    assert len(status["jobs"]) > 1
    assert len(status["rounds"]) > JOB_FILES
    counts = counted(project)
    assert all(counts[member] <= MEMBER_FILES for member in MEMBERS)
    assert all(counts[job["number"]] <= JOB_FILES for job in status["jobs"])
    assert project.epochs(RUN) == {member: list(range(1, 9)) for member in MEMBERS}


def test_a_run_of_many_rounds_has_no_more_files_than_one_of_few(start):
    many, few = (start(name, range(1, len(MEMBERS) + 1), 0.4) for name in ("many", "few"))
    rounds_of_many = len(finish(many, "--planner", "independent")["rounds"])
    rounds_of_few = len(finish(few, "--planner", "flotilla", "--alpha", "0")["rounds"])
    assert rounds_of_many > rounds_of_few
    a, b = counted(many), counted(few)
    a.pop("run"), b.pop("run")
    assert a == b
