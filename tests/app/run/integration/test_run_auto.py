"""A run with ``--mode auto`` whose jobs end in either phase: hops first, then data-parallel training."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from tiny_networks import ENSEMBLES
from workbench import ProjectFolder, wait_for

from hetctl.storage.progress_fold import events_in

pytestmark = pytest.mark.training
RUN = "phases-001"
ENSEMBLE = """\
name: phases
framework: pytorch
functions:
  input_fn: handwriting:staged_input_fn
  model_fn: tiny_torch:model_fn
  train_fn: tiny_torch:fit_train_fn
partitions: {{count: 2, path: '{disk}/{{partition}}.npz'}}
samples_per_epoch: 320
stop: {{metric: val_loss, patience: 99, max_epochs: 99}}
members:
"""
MEMBER = "  - {{name: {name}, config: {config}, batch_size: 16, stop: {{max_epochs: {epochs}}}}}\n"
CONFIG = {"units": 16, "optimizer": "adam", "learning_rate": 0.01, "pause_s": 0.2}
SITE = """\
extends: local
nodes: 1
gpus_per_node: 2
cores_per_node: 2
queues: [{name: local, max_nodes: 1, max_wall: 1h}]
"""


@pytest.fixture
def project(tmp_path):
    """Two members that only hop, and a third that goes on data-parallel when they have ended."""
    home, disk = tmp_path / "project", tmp_path / "disk"
    (home / "site-configs").mkdir(parents=True)
    disk.mkdir()
    rng = np.random.default_rng(0)
    for number in range(2):
        x, y = rng.random((200, 8, 8, 1), dtype=np.float32), rng.integers(0, 10, 200)
        np.savez(disk / f"{number}.npz", x=x[:160], y=y[:160], x_validation=x[160:], y_validation=y[160:])
    for module in ("tiny_torch", "handwriting"):
        shutil.copy(ENSEMBLES / f"{module}.py", home)
    epochs = {"a": 1, "b": 1, "long": 40}
    members = [MEMBER.format(name=n, config=json.dumps(CONFIG), epochs=count) for n, count in epochs.items()]
    (home / "ensemble.yaml").write_text(ENSEMBLE.format(disk=disk) + "".join(members))
    # Data-parallel training on two slots gains little: hops take less as long as they use both.
    rates = [f"{n},{k},{95 + 5 * k},{320 * count}\n" for n, count in epochs.items() for k in (1, 2)]
    (home / "rates.csv").write_text("member,gpus,rate,samples\n" + "".join(rates))
    (home / "site-configs" / "lab.yaml").write_text(SITE)
    made = ProjectFolder(home, environment={"HETCTL_SITE": "lab"})
    assert made.here("profile", "import", "rates.csv").code == 0
    return made


def events_of(project, kind):
    return [event for event in events_in(project.home.run(RUN)) if event.kind == kind]


def cancelled_after(project, condition):
    wait_for(condition)
    assert project.here("cancel").code == 0
    wait_for(lambda: project.here("status", "--json").json["jobs"][-1]["state"] not in ("pending", "running"))


def test_jobs_continue_after_an_end_in_either_phase(project):
    """Also members that hop again, while the third is in the middle of a data-parallel epoch."""
    submitted = project.here(
        "submit", "--mode", "auto", "--planner", "fixed-2", "--gpus", "2", "--time", "10m", "--json"
    )
    assert submitted.code == 0, submitted
    cancelled_after(project, lambda: len(events_of(project, "visit")) >= 3)
    assert project.epochs(RUN).get("long", []) == []
    assert project.here("submit", "--mode", "auto").code == 0
    cancelled_after(project, lambda: len(project.epochs(RUN).get("long", ())) >= 3)
    assert [event.data["part_samples"] > 0 for event in events_of(project, "stopped")] == [True]
    most = project.epochs(RUN)["long"][-1] + 2
    text = (project.path / "ensemble.yaml").read_text()
    edited = text.replace("epochs: 1}", "epochs: 2}").replace("epochs: 40}", f"epochs: {most}}}")
    (project.path / "ensemble.yaml").write_text(edited)
    done = project.here("submit", "--wait", "--json")
    assert (done.code, done.json["state"]) == (0, "finished"), done
    # A trainer that continues reports its last epoch again.
    epochs = {name: sorted(set(numbers)) for name, numbers in project.epochs(RUN).items()}
    assert epochs == {"a": [1, 2], "b": [1, 2], "long": [*range(1, most + 1)]}
    assert events_of(project, "failed") == []
    undone = [event for event in events_of(project, "visits_undone") if event.source == "long"]
    # Two to train and two to evaluate in an epoch; a second one begins if it is ahead of the others.
    assert sum(event.source == "long" for event in events_of(project, "visit")) in (4, 8)
    assert undone == []
