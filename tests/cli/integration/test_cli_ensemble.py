"""``hetctl ensemble``: what is averaged, and a folder that predicts the same without hetctl."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from workbench import ProjectFolder

DATA = """\
import numpy as np


def input_fn(_data):
    draws = np.random.default_rng(3)
    x = draws.normal(size=(900, 12)).astype("float32")
    y = (np.abs(x[:, :4]).sum(axis=1) + 0.7 * draws.normal(size=900) > 3.2).astype("int64")
    return (x[:600], y[:600]), (x[600:], y[600:])
"""
TORCH = """\
import torch
from torch import nn

from bands import input_fn


def accuracy(outputs, y):
    return (outputs.argmax(1) == y).float().mean()


def model_fn(config):
    torch.manual_seed(0)
    last = [nn.Softmax(1)] if config.get("softmax") else []
    model = nn.Sequential(nn.Linear(12, config["units"]), nn.ReLU(), nn.Linear(config["units"], 2), *last)
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=config["rate"]),
        "loss": nn.CrossEntropyLoss(),
        "metrics": {"accuracy": accuracy},
    }
"""
KERAS = """\
import keras

from bands import input_fn


def model_fn(config):
    last = "softmax" if config.get("softmax") else None
    layers = [keras.layers.Dense(config["units"], activation="relu"), keras.layers.Dense(2, activation=last)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=last is None)
    model.compile(keras.optimizers.Adam(config["rate"]), loss, metrics=["accuracy"])
    return model
"""
MODULES = {"pytorch": TORCH, "tensorflow": KERAS}
ENSEMBLE = """\
name: nets
framework: {framework}
functions: {{input_fn: {module}:input_fn, model_fn: {module}:model_fn}}
stop: {{metric: val_accuracy, patience: 9, max_epochs: 3}}
batch_size: 32
validation_batch_size: 77
members:
  - {{name: wide, config: {{units: 64, rate: 0.02}}}}
  - {{name: pairs, config: {{units: 16, rate: 0.02}}, seeds: 2}}
  - {{name: sure, config: {{units: 16, rate: 0.01, softmax: true}}}}
  - {{name: bare, config: {{units: 16, rate: 0.01}}, keep: {{predictions: 10}}}}
"""
PREDICT = """\
import json
import os
import sys

import numpy as np
import {framework}

for folder in sys.argv[2:]:
    if os.fork() == 0:
        sys.path[:0] = [folder]
        from predict import predict_fn

        sys.path[:0] = [sys.argv[1]]
        from bands import input_fn

        _, (x, y) = input_fn(None)
        found = predict_fn(x)
        loss = -np.log(found[np.arange(len(y)), y]).mean()
        accuracy = (found.argmax(1) == y).mean()
        print(json.dumps({{"accuracy": accuracy, "rows": len(found), "loss": loss}}), flush=True)
        assert not [name for name in sys.modules if name.split(".")[0] == "hetctl"]
        os._exit(0)
    assert os.wait()[1] == 0, folder
"""


def predicted(path, ways, framework):
    """Return what processes without hetctl predict, which are forks of one that imports the framework."""
    run = subprocess.run(
        [sys.executable, "-c", PREDICT.format(framework=framework), path, *ways],
        cwd=path,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


@pytest.mark.training
@pytest.mark.parametrize("framework", MODULES)
def test_an_ensemble_is_chosen_and_predicts_without_hetctl(tmp_path, framework):
    # Of other names in each test: this process imports the modules.
    module = f"bands_{framework}"
    for name, text in {"bands": DATA, module: MODULES[framework]}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "ensemble.yaml").write_text(ENSEMBLE.format(framework=framework, module=module))
    project = ProjectFolder(tmp_path, environment={"HETCTL_SITE": "local"})
    done = project.here("submit", "--wait", "--json")
    assert (done.code, done.json["state"]) == (0, "finished"), done.stderr
    best = {line["member"]: line["best"] for line in done.json["members"]}

    done = project.here("ensemble", "--soups", "--json")
    assert done.code == 0, done.stdout + done.stderr
    found = done.json
    assert (found["metric"], found["samples"]) == ("accuracy", 300)
    values = {one["member"]: one["value"] for one in found["candidates"]}
    assert values == pytest.approx({name: best[name] for name in ("wide", "pairs", "pairs-seed-1", "sure")})
    assert list(found["left_out"]) == ["bare"]
    ways = {one["way"]: one for one in found["combinations"]}
    assert set(ways["uniform-soup"]["weights"]) == {"pairs", "pairs-seed-1", "sure"}
    assert ways["greedy"]["fitted_value"] >= max(values.values())
    assert all(
        one["gain"]["low"] <= one["gain"]["mean"] <= one["gain"]["high"] for one in found["combinations"][1:]
    )

    written = ("greedy", "average", "greedy-soup")
    for way in written:
        done = project.here("ensemble", "nets-001", "--way", way, "-o", way, "--json")
        assert done.code == 0, done.stdout + done.stderr
    # With what its first optimizer would import in each fork.
    package = {"pytorch": "torch._dynamo", "tensorflow": "keras"}[framework]
    for way, used in zip(written, predicted(tmp_path, written, package), strict=True):
        assert used["rows"] == 300
        assert used["accuracy"] == pytest.approx(ways[way]["fitted_value"], abs=1e-9), way
    shown = project.here("ensemble")
    assert "greedy" in shown.stdout
    assert "left out: bare" in shown.stdout
    refused(project)


def refused(project):
    for arguments, words in {
        ("-o", "greedy"): ("exists already", "--force"),
        ("nets-009",): ("no run 'nets-009'", "nets-001"),
    }.items():
        done = project.here("ensemble", *arguments, "--json")
        assert done.code == 2
        told = f"{done.error['message']} {done.error['hint']}"
        assert [word for word in words if word not in told] == [], told


SCRIPT = """\
import sys

import hetctl
import numpy as np

seed, file = int(sys.argv[1]), f"{sys.argv[1]}.npz"
targets = np.random.default_rng(0).integers(0, 3, 90)
for epoch in (1, 2, 3):
    draws = np.random.default_rng([seed, epoch])
    outputs = draws.normal(size=(90, 3)) + 2.0 * np.eye(3)[targets] * (epoch != 3)
    np.savez(file, outputs=outputs, targets=targets)
    handed_in = {"predictions": file} if seed else {}
    hetctl.report(epoch=epoch, val_accuracy=(outputs.argmax(1) == targets).mean(), **handed_in)
    hetctl.should_stop()
"""


def test_scripts_hand_in_their_predictions(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    members = [
        f"  - {{name: s{seed}, command: [{sys.executable}, train.py, '{seed}']}}\n" for seed in range(3)
    ]
    (tmp_path / "ensemble.yaml").write_text(
        f"name: own\nstop: {{metric: val_accuracy, mode: max, max_epochs: 3}}\nmembers:\n{''.join(members)}"
    )
    project = ProjectFolder(tmp_path, environment={"HETCTL_SITE": "local"})
    done = project.here("submit", "--wait", "--json")
    best = {line["member"]: line["best"] for line in done.json["members"]}
    found = project.here("ensemble", "--soups", "--json").json
    assert found["left_out"] == {"s0": "its script has handed in no predictions"}
    assert {one["member"]: one["value"] for one in found["candidates"]} == pytest.approx(
        {name: best[name] for name in ("s1", "s2")}
    )
    # Independent noise: the average of two is better than each.
    (average,) = (one for one in found["combinations"] if one["way"] == "average")
    assert average["fitted_value"] > max(best.values())
    done = project.here("ensemble", "--way", "average", "-o", "folder", "--json")
    assert done.code == 2
    assert "trained by scripts" in done.error["message"]
    assert not (tmp_path / "folder").exists()
