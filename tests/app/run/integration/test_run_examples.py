"""Examples of scripts with an adapter each: real ensembles in real jobs on this machine."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from workbench import ProjectFolder, wait_for

from hetctl.app.project import start_project
from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.storage.progress_fold import events_in

pytestmark = pytest.mark.training


class Example(NamedTuple):
    """An example that is a script.

    Parameters
    ----------
    member : str
        Its first member.
    gpus : int
        GPUs on which the test starts it.
    classes : int
        Classes that it tells apart.
    kills : int
        Times that it is killed.
    modules : tuple of str
        What a warm Python imports for it.
    """

    member: str
    gpus: int
    classes: int
    kills: int
    modules: tuple[str, ...]


PYTORCH = ("torch", "lightning.pytorch", "transformers.trainer")
# What a kill leaves to start from is hetctl's part, whichever the framework: of two ranks, and of one.
EXAMPLES = {
    "ddp": Example("resnet-blocks-2", 2, 4, 1, PYTORCH),
    "hugging-face": Example("bert-hidden-32", 2, 2, 0, PYTORCH),
    "hydra": Example("wide", 1, 10, 1, ("keras",)),
    "lightning": Example("cnn-width-8", 2, 4, 0, PYTORCH),
}
LOSSES = {"val_loss", "eval_loss"}
HARM = f"""\
import os, signal, time
from pathlib import Path

from hetctl import script

plain = script.report

def report(**said):
    folder, epoch = Path(os.environ["HETCTL_CHECKPOINT_DIR"]), said["epoch"]

    def once(name):
        return not (folder / name).exists() and not (folder / name).touch()

    if os.environ["RANK"] == "0":
        with (folder / "reports.txt").open("a") as file:
            print(epoch, os.environ["WORLD_SIZE"], file=file)
    is_killed = os.environ["HETCTL_MEMBER"] in {[each.member for each in EXAMPLES.values() if each.kills]}
    if epoch == 2 and is_killed and once("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    plain(**said)
    if epoch == 3 and once("held"):
        while not script.should_stop():
            time.sleep(0.01)

script.report = report
"""
"""Module that warm Pythons import: scripts note their reports, and some die before the second.

All wait after the third until they are told to stop.
"""


def project_of(folder: Path, example: str) -> ProjectFolder:
    start_project(folder, example)
    # As in an active virtual environment: commands say `python`.
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return ProjectFolder(folder, environment={"HETCTL_SITE": "local", "PATH": programs})


def import_rates(project: ProjectFolder) -> None:
    assert project.here("profile", "import", "rates.csv").code == 0


@pytest.fixture
def project(tmp_path):
    """A project of the first member of each example."""
    made, members, rows = project_of(tmp_path / "all", "ddp"), [], ["member,gpus,rate,samples"]
    for name, example in EXAMPLES.items():
        own = project_of(tmp_path / name, name).path
        for script in (*own.glob("*.py"), *own.glob("config.yaml")):
            shutil.copy(script, made.path)
        text = yaml.safe_load((own / "ensemble.yaml").read_text())
        member = read_ensemble(own / "ensemble.yaml").member(example.member)
        ahead = {"preload": ["harm", *example.modules], "environment": {"HF_HUB_OFFLINE": "1"}}
        keys = {key: text[key] for key in ("command", "batch_size", "seed", "stop")}
        members.append(
            {"name": member.name, "config": dict(member.config), "gpus": example.gpus, **keys, **ahead}
        )
        rows += [row for row in (own / "rates.csv").read_text().splitlines() if row.startswith(member.name)]
    (made.path / "harm.py").write_text(HARM)
    (made.path / "rates.csv").write_text("\n".join(rows))
    (made.path / "ensemble.yaml").write_text(
        json.dumps({"name": "all", "samples_per_epoch": 512, "members": members})
    )
    gpus = sum(example.gpus for example in EXAMPLES.values())
    (made.path / "site.yaml").write_text(f"extends: local\ngpus_per_node: {gpus}\ncores_per_node: {gpus}\n")
    made.environment["HETCTL_SITE"] = "site.yaml"
    import_rates(made)
    return made


def reports_of(project: ProjectFolder, member: str) -> list[tuple[int, int]]:
    """Return the epochs that a member has tried to report, each with its number of ranks."""
    (path,) = project.path.glob(f".hetctl/checkpoints/*/{member}/reports.txt")
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()]


def test_killed_and_stopped_examples_go_on_with_other_ranks(project):
    assert project.here("submit", "--json").code == 0
    wait_for(lambda: len([*project.path.glob(".hetctl/checkpoints/*/*/held")]) == len(EXAMPLES))
    assert project.here("cancel", "--json").code == 0
    wait_for(lambda: any(event.kind == "job_ended" for event in project.driver_events("all-001")))
    file = project.path / "ensemble.yaml"
    file.write_text(file.read_text().replace('"gpus": 2', '"gpus": 1'))
    then = project.here("submit", "--wait", "--json")
    assert then.code == 0, then
    run = project.home.run("all-001")
    told = [event for event in events_in(run) if event.kind == "epoch"]
    for member, ranks, classes, kills, _ in EXAMPLES.values():
        # The report of epoch 2 was lost, and is repeated; that of epoch 3 was not, and is repeated as well.
        first = [(1, ranks), *[(2, ranks)] * (1 + kills), (3, ranks)]
        assert reports_of(project, member) == [*first, (3, 1), (4, 1), (5, 1)], member
        epochs = [event.data for event in told if event.source == member]
        assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3, 4, 5]
        # A network that guesses has the logarithm of the classes as its loss; ranks must not add theirs up.
        losses = [loss for epoch in epochs for key, loss in epoch["metrics"].items() if key in LOSSES]
        assert len(losses) == 5
        assert max(losses) < 1.5 * math.log(classes)
    # Both ranks have left the epoch after the same step.
    log = run.log_of(EXAMPLES["ddp"].member).read_text()
    (start,) = (line for line in log.splitlines() if line.endswith("on 1 ranks"))
    assert start in {f"start at sample {done} of epoch 4 on 1 ranks" for done in (64, 128)}


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
    project = project_of(tmp_path, example)
    import_rates(project)
    planned = project.here("plan", "--gpus", "2", "--json")
    assert planned.code == 0, planned
