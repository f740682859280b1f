"""``hetctl export``: plain PyTorch and Keras load what a run has trained, and get the same metrics."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from workbench import ProjectFolder

DATA = """\
import numpy as np


def input_fn(_data):
    draws = np.random.default_rng(3)
    x = draws.normal(size=(840, 20)).astype("float32")
    y = (x[:, :4].sum(axis=1) > 0).astype(int) + 2 * (x[:, 4] > 0)
    return (x[:640], y[:640]), (x[640:], y[640:])
"""
TORCH = """\
import torch
from torch import nn


class Network(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.into, self.back = nn.Linear(20, units), nn.Linear(20, units)
        self.back.weight = self.into.weight
        self.norm, self.head = nn.BatchNorm1d(units), nn.Linear(units, 4)

    def forward(self, x):
        return self.head(self.norm(torch.relu(self.into(x)) + torch.tanh(self.back(x))))


def accuracy(outputs, y):
    return (outputs.argmax(1) == y).float().mean()


def model_fn(config):
    model = Network(config["units"])
    optimizer = torch.optim.Adam(model.parameters(), lr=config["rate"])
    metrics = {"accuracy": accuracy}
    return {"model": model, "optimizer": optimizer, "loss": nn.CrossEntropyLoss(), "metrics": metrics}
"""
KERAS = """\
import keras


class Own(keras.layers.Dense):
    pass


def model_fn(config):
    dense = Own if config.get("own") else keras.layers.Dense
    norm = keras.layers.BatchNormalization()
    layers = [dense(config["units"], activation="relu"), norm, keras.layers.Dense(4)]
    model = keras.Sequential(layers if config.get("unbuilt") else [keras.Input((20,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(config["rate"]), loss, metrics=["accuracy"])
    return model
"""
ENSEMBLE = """\
name: nets
framework: {framework}
functions: {{input_fn: data:input_fn, model_fn: {module}:model_fn}}
stop: {{metric: val_loss, patience: 3, max_epochs: 6}}
members:
"""
TORCH_MEMBERS = """\
  - {name: plain, gpus: 1, config: {units: 24, rate: 0.08}}
  - {name: parts, gpus: 2, shard: true, keep: {best: 2}, config: {units: 24, rate: 0.08}}
"""
KERAS_MEMBERS = """\
  - {name: unbuilt, gpus: 1, config: {units: 24, rate: 0.08, unbuilt: true}}
  - {name: own, gpus: 1, config: {units: 24, rate: 0.08, own: true}}
"""

WITH_TORCH = """\
import torch
import safetensors.torch
from nets import model_fn

torch.set_num_threads(1)
is_plain = file.endswith(".pt")
state = torch.load(file, weights_only=True) if is_plain else safetensors.torch.load_file(file)
parts = model_fn(config)
model = parts["model"]
model.load_state_dict(state)
model.eval()
with torch.no_grad():
    x, y = map(torch.from_numpy, validation)
    right = int((model(x).argmax(1) == y).sum())
    batches = [(parts["loss"](model(a), b), len(b)) for a, b in zip(x.split(32), y.split(32))]
    loss = float(sum(each.double() * count for each, count in batches)) / len(y)
print(json.dumps({"val_accuracy": right / len(y), "val_loss": loss}))
"""
WITH_KERAS = """\
import keras

if file.endswith(".keras"):
    model = keras.models.load_model(file)
else:
    from nets import model_fn

    model = model_fn(config)
    model(validation[0][:1])
    model.load_weights(file)
x, y = validation
found = model.evaluate(x, y, batch_size=32, verbose=0, return_dict=True)
print(json.dumps({f"val_{name}": value for name, value in found.items()}))
"""
LOADER = """\
import json
import os
import sys

import {framework}

sys.path.insert(0, sys.argv[1])
for file, config in json.loads(sys.argv[2]):
    if os.fork() == 0:
        from data import input_fn

        _, validation = input_fn(None)
{body}
        assert not [name for name in sys.modules if name.split(".")[0] == "hetctl"]
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, file
"""


def project_of(path, framework, module, members):
    for name, text in {"data": DATA, "nets": module}.items():
        (path / f"{name}.py").write_text(text)
    (path / "ensemble.yaml").write_text(ENSEMBLE.format(framework=framework, module="nets") + members)
    names = [line.split("name: ")[1].split(",")[0] for line in members.splitlines()]
    gpus = [2 if "gpus: 2" in line else 1 for line in members.splitlines()]
    rates = [f"{name},{count},5000,640\n" for name, count in zip(names, gpus, strict=True)]
    (path / "rates.csv").write_text("member,gpus,rate,samples\n" + "".join(rates))
    project = ProjectFolder(path, environment={"HETCTL_SITE": "local"})
    assert project.here("profile", "import", "rates.csv").code == 0
    done = project.here("submit", "--wait", "--json")
    assert (done.code, done.json["state"]) == (0, "finished"), done.stderr
    return project


def loaded(project, found, framework, body):
    """Return the metrics that processes without hetctl compute with exported weights, file by file."""
    files = [(one["path"], {"units": 24, "rate": 0.08, "own": one["member"] == "own"}) for one in found]
    # An import of the framework takes longer than the rest: each file has a fork.
    program = LOADER.format(framework=framework, body=textwrap.indent(body, " " * 8))
    run = subprocess.run(
        [sys.executable, "-c", program, str(project.path), json.dumps(files)],
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "TF_NUM_INTRAOP_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def exported(project, *arguments):
    done = project.here("export", *arguments, "--json")
    assert done.code == 0, done.stdout + done.stderr
    return done.json


@pytest.mark.training
def test_pytorch_loads_the_weights_and_gets_the_same_metrics(tmp_path):
    project = project_of(tmp_path, "pytorch", TORCH, TORCH_MEMBERS)
    status = project.here("status", "--json").json
    history = {name: {e["epoch"]: e["metrics"] for e in epochs} for name, epochs in status["history"].items()}
    best = {name: min(of, key=lambda epoch, of=of: of[epoch]["val_loss"]) for name, of in history.items()}
    for line in status["members"]:
        assert line["best_epoch"] == best[line["member"]]
        assert Path(line["best_checkpoint"]).is_file()
    files = []
    for member, file, options in (
        ("plain", "plain.pt", ()),
        ("plain", "last.safetensors", ("--last",)),
        ("parts", "parts.pt", ()),
        ("parts", "parts.safetensors", ()),
    ):
        found = exported(project, member, *options, "-o", file)
        epoch = max(history[member]) if "--last" in options else best[member]
        assert (found["epoch"], found["metrics"]) == (epoch, history[member][epoch])
        files.append(found)
    for found, metrics in zip(files, loaded(project, files, "torch._dynamo", WITH_TORCH), strict=True):
        member, file = found["member"], found["path"]
        assert metrics["val_accuracy"] == found["metrics"]["val_accuracy"], file
        # Two ranks add up the losses of other batches.
        exact = pytest.approx(found["metrics"]["val_loss"], rel=1e-6 if member == "parts" else 0.0, abs=0.0)
        assert metrics["val_loss"] == exact, file
    card = (tmp_path / "plain.pt.md").read_text()
    for part in ("nets:model_fn", '"units": 24', f"**{best['plain']}**", "torch 2", "digest of the code"):
        assert part in card
    refused(project, best["parts"])
    pruned(project, found["run"], best, before=found["metrics"])


def pruned(project, run, best, before):
    """Check that only best epochs stay, whose weights are still exported."""
    assert project.here("prune", run, "--yes").code == 2
    done = project.here("prune", run, "--keep-best", "--yes", "--json").json
    (told,) = done["pruned"]
    assert (told["run"], told["members"]) == (run, list(best))
    assert told["freed_bytes"] > 0
    for member, epoch in best.items():
        folder = project.path / ".hetctl/checkpoints" / run / member
        assert {path.name[:11] for path in folder.glob("epoch-*")} == {f"epoch-{epoch:05d}"}
    assert exported(project, "parts", "-o", "after.pt")["metrics"] == before
    again = project.here("prune", run, "--keep-best", "--yes", "--json").json
    assert again["pruned"][0]["freed_bytes"] == 0


def refused(project, kept):
    """Check what cannot be exported, and that nothing is written then."""
    before = sorted(path.name for path in project.path.iterdir())
    for arguments, words in {
        ("plain", "-o", "plain.pt"): ("exists already", "--force"),
        ("plain", "-o", "plain.keras"): (".pt or .safetensors", "pytorch"),
        ("planes", "-o", "new.pt"): ("no member 'planes'", "plain, parts"),
        ("nets-009", "plain", "-o", "new.pt"): ("no run 'nets-009'", "nets-001"),
        ("parts", "--epoch", "99", "-o", "new.pt"): ("epoch 99", str(kept), "--epoch"),
        ("plain", "-o", "none/new.pt"): ("no folder none",),
    }.items():
        done = project.here("export", *arguments, "--json")
        assert done.code == 2
        told = f"{done.error['message']} {done.error['hint']}"
        assert [word for word in words if word not in told] == [], told
    assert sorted(path.name for path in project.path.iterdir()) == before
    assert project.here("export", "plain", "-o", "plain.pt", "--force").code == 0


@pytest.mark.training
def test_keras_loads_the_weights_and_gets_the_same_metrics(tmp_path):
    project = project_of(tmp_path, "tensorflow", KERAS, KERAS_MEMBERS)
    files = [
        exported(project, member, "-o", file)
        for member, file in (
            ("unbuilt", "unbuilt.keras"),
            ("own", "own.weights.h5"),
        )
    ]
    assert "load_weights" in files[-1]["note"]
    for found, metrics in zip(files, loaded(project, files, "keras", WITH_KERAS), strict=True):
        assert metrics == {n: value for n, value in found["metrics"].items() if n != "loss"}, found["path"]
    done = project.here("export", "own", "-o", "own.keras", "--json")
    assert done.code == 2
    assert "nets.Own" in done.error["message"]
    assert ".weights.h5" in done.error["hint"]
    assert not (tmp_path / "own.keras").exists()


SCRIPT = """\
import os
from pathlib import Path

import hetctl

folder = Path(os.environ["HETCTL_CHECKPOINT_DIR"])
for epoch, loss in enumerate((0.5, 0.3, 0.4), start=1):
    (folder / "last").mkdir(exist_ok=True)
    (folder / "last" / "weights").write_text(f"epoch {epoch}")
    hetctl.report(epoch=epoch, val_loss=loss, checkpoint=folder / "last")
    if hetctl.should_stop():
        break
"""


def test_the_checkpoint_of_a_script_is_copied(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ensemble.yaml").write_text(
        "name: own\nstop: {metric: val_loss, max_epochs: 3}\nmembers:\n"
        f"  - {{name: s, gpus: 1, command: [{sys.executable}, train.py]}}\n"
    )
    (tmp_path / "rates.csv").write_text("member,gpus,rate,samples\ns,1,100,100\n")
    project = ProjectFolder(tmp_path, environment={"HETCTL_SITE": "local"})
    assert project.here("profile", "import", "rates.csv").code == 0
    assert project.here("submit", "--wait").code == 0
    (line,) = project.here("status", "--json").json["members"]
    assert line["best_epoch"] == 2
    for options, epoch in (((), 2), (("--last",), 3), (("--epoch", "2"), 2)):
        target = tmp_path / f"copy-{epoch}-{len(options)}"
        found = exported(project, "s", *options, "-o", str(target))
        assert (found["epoch"], found["path"]) == (epoch, str(target))
        assert (target / "weights").read_text() == f"epoch {epoch}"
        assert "train.py" in Path(found["card"]).read_text()
    done = project.here("export", "s", "--epoch", "1", "-o", "none", "--json")
    assert (done.code, "2, 3" in done.error["message"]) == (2, True)
