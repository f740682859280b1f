"""Examples of scripts with an adapter each: real ensembles in real jobs on this machine."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from machine_speed import limit
from workbench import ProjectFolder, wait_for

from hetctl.app.project import start_project
from hetctl.storage.progress_fold import events_in

pytestmark = pytest.mark.training


class Example(NamedTuple):
    """An example that is a script.

    Parameters
    ----------
    member : str
        Its first member.
    both, one : str
        Text in its ensemble file that names the second member too, and what leaves that out.
    gpus : int
        GPUs on which the test starts it.
    classes : int
        Classes that it tells apart.
    """

    member: str
    both: str
    one: str
    gpus: int
    classes: int


EXAMPLES = {
    "ddp": Example("resnet-blocks-2", "[2, 3]", "[2]", 2, 4),
    "hugging-face": Example("bert-hidden-32", "[32, 48]", "[32]", 2, 2),
    "hydra": Example("wide", "  - {name: deep,", "#", 1, 10),
    "lightning": Example("cnn-width-8", "[8, 16]", "[8]", 2, 4),
}

LOSSES = {"val_loss", "eval_loss"}
HARM = """\
import os, signal, time
from pathlib import Path

if os.environ.get("HETCTL_MEMBER") == os.environ.get("HARMED"):
    from hetctl import script

    plain, folder = script.report, Path(os.environ["HETCTL_CHECKPOINT_DIR"])

    def once(name):
        mark = folder / name
        return not mark.exists() and not mark.touch()

    def report(**said):
        if os.environ["RANK"] == "0":
            with (folder / "reports.txt").open("a") as file:
                print(said["epoch"], os.environ["WORLD_SIZE"], file=file)
        if str(said["epoch"]) == os.environ.get("KILLED_AT") and once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        plain(**said)
        if str(said["epoch"]) == os.environ.get("HELD_AT") and once("held"):
            while not script.should_stop():
                time.sleep(0.01)

    script.report = report
"""
"""Module that Python imports at its start: a script dies before a report, or waits until it is told to stop.

It notes its reports.
"""


def project_of(folder: Path, example: str, **harm: str) -> ProjectFolder:
    """Make a project of an example with its first member alone, which comes to harm."""
    start_project(folder / "project", example)
    (folder / "harm").mkdir()
    (folder / "harm/sitecustomize.py").write_text(HARM)
    path = os.pathsep.join([str(folder / "harm"), os.environ.get("PYTHONPATH", "")])
    # As in an active virtual environment: commands say `python`.
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"HETCTL_SITE": "local", "PYTHONPATH": path, "PATH": programs}
    environment |= {"HARMED": EXAMPLES[example].member, **harm}
    project = ProjectFolder(folder / "project", environment=environment)
    file, rates = project.path / "ensemble.yaml", project.path / "rates.csv"
    member, both, one, *_ = EXAMPLES[example]
    assert file.read_text().count(both) == 1
    file.write_text(file.read_text().replace(both, one))
    rows = rates.read_text().splitlines()
    rates.write_text("\n".join(row for row in rows if row.startswith(("member", member))))
    return project


def import_rates(project: ProjectFolder) -> None:
    assert project.here("profile", "import", "rates.csv").code == 0


def run_of(project: ProjectFolder) -> str:
    return next(path.name for path in (project.path / ".hetctl/runs").iterdir())


def reports_of(project: ProjectFolder, member: str) -> list[tuple[int, int]]:
    """Return the epochs that a member has tried to report, each with its number of ranks."""
    (path,) = (project.path / ".hetctl").rglob(f"{member}/reports.txt")
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()]


def hold(project: ProjectFolder, *options: str) -> None:
    """Submit, wait until the member is held, and cancel the job."""
    import_rates(project)
    submitted = project.here("submit", "--json", *options)
    assert submitted.code == 0, submitted
    wait_for(lambda: list((project.path / ".hetctl").rglob("held")))
    assert project.here("cancel", "--json").code == 0
    wait_for(lambda: any(event.kind == "job_ended" for event in project.driver_events(run_of(project))))


@pytest.mark.parametrize(
    ("name", "harm"),
    # What a kill leaves to start from is hetctl's part, whichever the framework is.
    [("hugging-face", {}), ("hydra", {"KILLED_AT": "2"}), ("lightning", {})],
)
def test_a_killed_and_stopped_example_goes_on(tmp_path, name, harm):
    example, project = EXAMPLES[name], project_of(tmp_path, name, HELD_AT="3", **harm)
    ranks = example.gpus
    hold(project, "--gpus", str(ranks), "--planner", "static")
    then = project.here("submit", "--gpus", "1", "--planner", "static", "--wait", "--json")
    assert then.code == 0, then
    assert project.epochs(run_of(project)) == {example.member: [1, 2, 3, 4, 5]}
    # The report of epoch 2 was lost, and is repeated; that of epoch 3 was not, and is repeated as well.
    first = [(1, ranks), *[(2, ranks)] * (1 + len(harm)), (3, ranks)]
    assert reports_of(project, example.member) == [*first, (3, 1), (4, 1), (5, 1)]
    # A network that guesses has the logarithm of the classes as its loss; ranks must not add theirs up.
    epochs = [event.data for event in events_in(project.home.run(run_of(project))) if event.kind == "epoch"]
    losses = [loss for epoch in epochs for key, loss in epoch["metrics"].items() if key in LOSSES]
    assert len(losses) == 5
    assert max(losses) < 1.5 * math.log(example.classes)


def test_a_killed_example_goes_on_in_the_next_job(tmp_path):
    project = project_of(tmp_path, "ddp", KILLED_AT="2", HELD_AT="3")
    import_rates(project)
    done = project.here("submit", "--gpus", "1", "--time", limit(22), "--wait", "--json")
    assert (done.code, len(done.json["jobs"]) > 1) == (0, True), done
    assert project.epochs(run_of(project)) == {EXAMPLES["ddp"].member: [1, 2, 3, 4, 5]}
    events = events_in(project.home.run(run_of(project)))
    assert {event.data["reason"] for event in events if event.kind == "stopped"} == {"deadline"}
    # On a loaded machine the limit may come at another epoch, too: its report is then repeated as well.
    epochs = [epoch for epoch, _ in reports_of(project, EXAMPLES["ddp"].member)]
    assert epochs == sorted(epochs)
    assert min(epochs.count(2), epochs.count(3)) > 1


def test_an_example_goes_on_with_other_ranks(tmp_path):
    project = project_of(tmp_path, "ddp", HELD_AT="2")
    hold(project, "--gpus", "2", "--planner", "static")
    then = project.here("submit", "--gpus", "1", "--planner", "static", "--wait", "--json")
    assert then.code == 0, then
    assert reports_of(project, EXAMPLES["ddp"].member) == [(1, 2), (2, 2), (2, 1), (3, 1), (4, 1), (5, 1)]
    # Both ranks have left the epoch after the same step.
    log = project.home.run(run_of(project)).log_of(EXAMPLES["ddp"].member).read_text()
    (start,) = (line for line in log.splitlines() if line.endswith("on 1 ranks"))
    assert start in {f"start at sample {done} of epoch 3 on 1 ranks" for done in (64, 128)}


def test_a_wrong_key_of_an_example_is_the_cause(tmp_path):
    project = project_of(tmp_path, "hydra")
    file = project.path / "ensemble.yaml"
    file.write_text(file.read_text().replace("- model.units=", "- model.unit="))
    import_rates(project)
    done = project.here("submit", "--gpus", "1", "--retries", "0", "--wait", "--json")
    assert done.code == 5
    assert "full_key: model.unit" in done.json["members"][0]["reason"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_has_rates_for_its_members(tmp_path, example):
    start_project(tmp_path, example)
    project = ProjectFolder(tmp_path, environment={"HETCTL_SITE": "local"})
    import_rates(project)
    planned = project.here("plan", "--gpus", "2", "--json")
    assert planned.code == 0, planned
