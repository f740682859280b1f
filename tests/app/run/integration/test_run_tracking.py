"""Epochs of runs in trackers: in databases, servers and files, and after commands that were killed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, suppress
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest
from workbench import pretending, pretending_project

from hetctl.app.project import Project
from hetctl.app.run.tracking import BROKEN, DONE, GOES_ON, Forwarder
from hetctl.storage.paths import Home
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import read_spec, write_spec

# MLflow is imported by tests alone, as it takes long; it itself uses what SQLAlchemy and others will remove.
pytestmark = [
    pytest.mark.skipif(find_spec("mlflow") is None, reason="no MLflow on this machine"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

ENSEMBLE = pretending("duo", 3, a="{epochs: 2, lr: 0.5}", b="{epochs: 3}", c="{fail: true}")
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with a tracked run that has ended, of which a member has failed."""
    made = pretending_project(tmp_path_factory.mktemp("tracked"), ENSEMBLE)
    told = made.here("submit", "--track", "mlflow", "--retries", "0", "--wait")
    assert told.code == 5
    assert "warning" not in told.stderr
    return made


@pytest.fixture
def forwarder(project):
    """A command that forwards the run of the project as if none had before, as far as hetctl knows."""
    project.home.run("duo-001").tracking.unlink(missing_ok=True)
    return Forwarder(Project(project.path, Home(project.home.path)), "duo-001")


def shown_at(address):
    """Return the run of a run, and the runs of its members by name, with their metrics by epoch."""
    from mlflow import MlflowClient

    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("duo")
    runs = client.search_runs([experiment.experiment_id], "tags.`hetctl.run` LIKE 'duo-001-%'")
    around = [run for run in runs if "hetctl.member" not in run.data.tags]
    members = {run.data.tags["hetctl.member"]: run for run in runs if run not in around}
    assert len(around) == 1
    assert len(members) == len(runs) - 1
    history = {
        name: {
            key: [m.step for m in client.get_metric_history(run.info.run_id, key)] for key in run.data.metrics
        }
        for name, run in members.items()
    }
    return around[0], members, history


def database(project):
    return f"sqlite:///{project.path / 'mlflow.db'}"


def check(project, address):
    around, members, history = shown_at(address)
    assert (around.info.run_name, around.info.status) == ("duo-001", BROKEN)
    assert around.data.params["planner"]
    assert {name: run.info.status for name, run in members.items()} == {"a": DONE, "b": DONE, "c": BROKEN}
    assert {run.data.tags["mlflow.parentRunId"] for run in members.values()} == {around.info.run_id}
    assert members["a"].data.params.items() >= {"lr": "0.5", "epochs": "2"}.items()
    for name, epochs in (("a", [1, 2]), ("b", [1, 2, 3])):
        assert {"val_accuracy", "duration_s", "gpus"} <= history[name].keys()
        assert all(steps == epochs for steps in history[name].values())
    best = {member["member"]: member["best"] for member in project.here("status", "--json").json["members"]}
    assert members["b"].data.metrics["val_accuracy"] == pytest.approx(best["b"])


def test_a_run_is_nested_by_member_with_its_epochs(project):
    check(project, database(project))


def test_nothing_new_asks_nobody(project, monkeypatch):
    from mlflow import MlflowClient

    assert project.here("status").code == 5
    monkeypatch.setattr(MlflowClient, "__init__", lambda *_, **__: pytest.fail("MLflow was asked"))
    assert "warning" not in project.here("status").stderr


def test_a_command_that_forgets_what_it_sent_sends_nothing_twice(project, forwarder):
    assert forwarder.send("failed") == ""
    check(project, database(project))


@pytest.mark.usefixtures("forwarder")
@pytest.mark.parametrize("command", ["advance", "report"])
def test_commands_that_look_at_a_run_forward_it(project, monkeypatch, tmp_path, command):
    address = f"sqlite:///{tmp_path / 'other.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    told = project.here(command)
    assert (told.code, told.stderr) == (0, "")
    check(project, address)


def test_a_run_that_goes_on_again_is_shown_so(project, forwarder):
    assert forwarder.send("running") == ""
    assert shown_at(database(project))[0].info.status == GOES_ON
    assert forwarder.send("failed") == ""
    check(project, database(project))


@pytest.mark.parametrize("after", range(0, 12, 2))
def test_a_killed_command_is_made_up_for(project, forwarder, monkeypatch, tmp_path, after):
    address = f"sqlite:///{tmp_path / 'other.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    left = [after]

    def dying(real):
        def call(*arguments, **keys):
            left[0] -= 1
            if left[0] < 0:
                raise ConnectionError("no route\nat all")
            return real(*arguments, **keys)

        return call

    from mlflow import MlflowClient

    with monkeypatch.context() as patch:
        for name in ("create_run", "log_batch", "set_terminated", "create_experiment"):
            patch.setattr(MlflowClient, name, dying(getattr(MlflowClient, name)))
        warning = forwarder.send("failed")
        assert warning.endswith("took nothing: no route; the next command sends what it lacks")
        assert forwarder.send("failed") == ""  # told already
    other = Forwarder(Project(project.path, Home(project.home.path)), "duo-001")
    assert other.send("failed") == ""
    check(project, address)


def test_a_server_is_sent_the_same(project, forwarder, monkeypatch, tmp_path):
    pytest.importorskip("mlflow.server")
    pytest.importorskip("flask")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    store = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path / 'server.db'}",
        "--artifacts-destination",
        str(tmp_path),
    ]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, *words, *store], stdout=log, stderr=log, start_new_session=True
        ) as server,
    ):
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_until_it_answers(f"{address}/health", tmp_path / "log")
            monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
            assert forwarder.send("failed") == ""
            check(project, address)
        finally:
            _end(server)


def shown_by_wandb(folder):
    """Return the runs in W&B's files by name: their group, config, losses by epoch, and exit code."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    found = {}
    for path in folder.glob("offline-run-*/run-*.wandb"):
        store, about, epochs, code = DataStore(), None, {}, None
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                about = record.run
            elif kind == "exit":
                code = record.exit.exit_code
            elif kind == "history":
                values = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
                epochs[record.history.step.num] = values
        store.close()
        config = {each.key: json.loads(each.value_json) for each in about.config.update}
        assert about.display_name not in found
        found[about.display_name] = (about.run_group, config, epochs, code)
    return found


@pytest.mark.skipif(find_spec("wandb") is None, reason="no W&B on this machine")
@pytest.mark.usefixtures("forwarder")
def test_wandb_gets_each_member_that_has_ended_once(project):
    # Its import takes 3 s, but 15 where thousands of modules are loaded, which it all looks through.
    process = get_context("spawn").Process(target=check_wandb, args=(project,))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0


def check_wandb(project):
    run, folder = project.home.run("duo-001"), project.path / "wandb"
    spec = read_spec(run)
    write_spec(run, replace(spec, track="wandb"))
    try:
        forwarder = Forwarder(Project(project.path, Home(project.home.path)), "duo-001")
    finally:
        write_spec(run, spec)
    assert [forwarder.send(state) for state in ("running", "failed")] == ["", ""]
    shown = shown_by_wandb(folder)
    assert {name: code for name, (_, _, _, code) in shown.items()} == {"a": 0, "b": 0, "c": 1}
    group, config, epochs, _ = shown["b"]
    assert (group, config["epochs"], sorted(epochs)) == ("duo-001", 3, [1, 2, 3])
    done = {
        event.record.epoch: event.record
        for event in events_in(run)
        if (event.source, event.kind) == ("b", "epoch")
    }
    for number, values in epochs.items():
        assert values["val_accuracy"] == done[number].metrics["val_accuracy"]
        assert values["_timestamp"] == pytest.approx(done[number].finished_at)
    # Another command writes nothing again but what a killed one has left without a mark.
    outdated, *others = folder.iterdir()
    (outdated / "hetctl.json").unlink()
    run.tracking.unlink()
    assert forwarder.send("failed") == ""
    assert {path.name for path in others} < {path.name for path in folder.iterdir()}
    assert shown_by_wandb(folder).keys() == shown.keys()


def _wait_until_it_answers(address: str, log: Path) -> None:
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        with suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.5)
    pytest.fail(log.read_text())


def _end(server: subprocess.Popen) -> None:
    import os
    import signal

    os.killpg(server.pid, signal.SIGTERM)
    server.wait(30)


def test_a_package_that_is_missing_is_named_before_anything_is_submitted(tmp_path, monkeypatch):
    made = pretending_project(tmp_path, ENSEMBLE)
    monkeypatch.setattr("hetctl.cli.cmd_run.find_spec", lambda _: None)
    told = made.here("submit", "--track", "mlflow", "--json")
    assert told.code == 2
    assert "pip install 'hetctl[mlflow]'" in told.error["hint"]
    assert not made.home.catalog.exists()
