"""``import hetctl``: the same project by Python and by commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import pytest

import hetctl
from hetctl.api import BadInputError, HetctlError, Run
from hetctl.cli.main import cli
from hetctl.cli.options import called
from hetctl.model.plan import Plan

NETS = """\
import hetctl
import torch
from torch import nn


def input_fn(_data):
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(600, 20, generator=draws).numpy()
    y = (x[:, :4].sum(axis=1) > 0).astype("int64")
    return (x[:500], y[:500]), (x[500:], y[500:])


def accuracy(outputs, y):
    return (outputs.argmax(1) == y).float().mean()


def built(model, rate):
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    metrics = {"accuracy": accuracy}
    return {"model": model, "optimizer": optimizer, "loss": nn.CrossEntropyLoss(), "metrics": metrics}


@hetctl.member
def flat(config):
    return built(nn.Linear(20, 2), 0.1)


@hetctl.member(name="hidden", config={"units": 8}, stop={"metric": "val_accuracy", "max_epochs": 2})
def with_units(config):
    units = config["units"]
    return built(nn.Sequential(nn.Linear(20, units), nn.ReLU(), nn.Linear(units, 2)), 0.01)


unnamed = lambda path: path
"""
STOP = {"metric": "val_accuracy", "patience": 3, "max_epochs": 3}


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of networks in a project of its own."""
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HETCTL_HOME", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    import nets

    return nets


def ensemble(nets, **keys) -> hetctl.Ensemble:
    usual = {"name": "zoo", "input_fn": nets.input_fn, "members": [nets.flat, nets.with_units], "stop": STOP}
    return hetctl.Ensemble(**{**usual, **keys})


def test_keys_in_python_define_what_the_same_keys_in_a_file_do(nets, tmp_path):
    (tmp_path / "zoo.yaml").write_text(
        f"""\
name: zoo
functions: {{input_fn: nets:input_fn, model_fn: nets:flat}}
stop: {json.dumps(STOP)}
members:
  - name: flat
  - name: hidden
    config: {{units: 8}}
    functions: {{input_fn: nets:input_fn, model_fn: nets:with_units}}
    stop: {{metric: val_accuracy, max_epochs: 2}}
"""
    )
    assert ensemble(nets).definition == hetctl.Ensemble("zoo.yaml").definition


@pytest.mark.training
def test_a_run_from_python_gives_its_epochs_and_its_best_weights(nets, tmp_path):
    plan = hetctl.plan(ensemble(nets), site="local", gpus=2)
    assert isinstance(plan, Plan)
    run = hetctl.submit(ensemble(nets), site="local", gpus=2, wait=True)
    assert run.status().state == "finished"
    epochs = run.frame()
    assert dict(epochs.groupby("member").size()) == {"flat": 3, "hidden": 2}
    assert set(epochs[epochs.member == "hidden"]["config.units"]) == {8}
    members = run.frame("members").set_index("member")
    assert dict(members["best"]) == dict(epochs.groupby("member")["val_accuracy"].max())
    # The weights are those of the best epoch: plain PyTorch gets its accuracy.
    import torch

    best = members["best"].idxmax()
    model = {"flat": nets.flat, "hidden": nets.with_units}[best]({"units": 8})["model"]
    model.load_state_dict(hetctl.run().best().state_dict())
    _, (x, y) = nets.input_fn(None)
    with torch.no_grad():
        found = nets.accuracy(model(torch.from_numpy(x)), torch.from_numpy(y))
    assert float(found) == pytest.approx(members["best"].max(), abs=1e-7)
    said = run.best("hidden").export(tmp_path / "hidden.pt")
    assert (said["member"], said["epoch"]) == ("hidden", members.loc["hidden", "best_epoch"])
    with pytest.raises(BadInputError, match="exists already"):
        run.best("hidden").export(tmp_path / "hidden.pt")


@pytest.mark.parametrize(
    ("options", "rule"),
    [({"gpsu": 2}, "--gpsu"), ({"gpus": 0}, "--gpus"), ({"time": "soon"}, "--time")],
)
def test_options_are_those_of_the_command(nets, options, rule):
    with pytest.raises(BadInputError, match=rule):
        hetctl.plan(ensemble(nets), **options)


def test_an_option_means_what_it_means_to_the_command():
    command = cli.get_command(click.Context(cli), "submit")
    given = {"time": "2h", "node_hours": 1.5, "chain": True, "mix_types": False, "queue": None, "fuse": False}
    with called(command, given) as context:
        read = {name: context.params[name] for name in given}
    assert read == {**given, "time": 7200, "mix_types": None}


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        (lambda nets: {"input_fn": nets.unnamed}, "module:function"),
        (lambda _: {"members": [{"name": "a", "patience": 2}]}, "unknown key 'patience'"),
        (lambda _: {"file": "zoo.yaml"}, "both the file"),
        (lambda _: {"input_fn": json.loads}, "several folders"),
    ],
)
def test_wrong_keys_are_refused(nets, keys, rule):
    with pytest.raises(BadInputError, match=rule):
        ensemble(nets, **keys(nets))


def test_a_function_without_a_file_is_refused(nets):
    made: dict[str, object] = {"__name__": "nowhere"}
    sys.modules["nowhere"] = type(sys)("nowhere")
    exec("def input_fn(path): ...", made)
    with pytest.raises(BadInputError, match="is in no file"):
        ensemble(nets, input_fn=made["input_fn"])


@pytest.mark.usefixtures("nets")
def test_what_is_not_there_is_said():
    with pytest.raises(HetctlError, match="no catalog"):
        hetctl.run()
    with pytest.raises(BadInputError, match="no frame 'steps'"):
        Run("zoo-001").frame("steps")
    with pytest.raises(AttributeError, match="no attribute 'sumbit'"):
        hetctl.sumbit  # noqa: B018
