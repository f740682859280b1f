"""Members that are commands: real scripts in real jobs on this machine."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest
from workbench import TINY, alive, new_project, wait_for

from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import checkpoint_folder, read_spec

RUN = "own-001"


def project_of(folder, *words: str, script: str = "own_script.py", gpus: int = 1, rates: str = "", **stop):
    rule = {"metric": "val_loss", "patience": 200, "max_epochs": 100, **stop}
    command = json.dumps([sys.executable, script, *words])
    ensemble = f"name: own\nstop: {json.dumps(rule)}\nmembers:\n"
    ensemble += f"  - {{name: a, command: {command}, config: {{epochs: 4}}, max_gpus: {gpus}}}\n"
    project = new_project(folder / "project", ensemble, environment={"HETCTL_SITE": "local"})
    shutil.copy(TINY / script, project.path)
    (project.path / "rates.csv").write_text(rates or "member,gpus,rate,samples\na,1,1000,100\n")
    assert project.here("profile", "import", "rates.csv").code == 0
    return project


def submitted(project, *options: str):
    return project.here("submit", "--gpus", "1", "--wait", "--json", *options)


def events(project, kind: str, member: str = "a") -> list:
    found = events_in(project.home.run(RUN))
    return [event.data for event in found if (event.kind, event.source) == (kind, member)]


def log_of(project, member: str = "a") -> str:
    return project.home.run(RUN).log_of(member).read_text()


def stopped_by(project) -> list[str]:
    return [event["reason"] for event in events(project, "stopped")]


FATES = {
    "trained": ["--epochs", "4"],
    "ruled": ["--epochs", "1000", "--epoch-s", "0.02"],
    "child": ["--epochs", "4", "--harm", "child"],
    "rank": ["--epochs", "4", "--harm", "rank"],
    "garbage": ["--epochs", "2", "--harm", "garbage"],
    "fails": ["--harm", "fail"],
}
"""Words of the script of each member."""


@pytest.fixture(scope="module")
def fates(tmp_path_factory):
    """A run of members whose scripts end in different ways, and what the command said of each."""
    commands = {name: [sys.executable, "own_script.py", *words] for name, words in FATES.items()}
    commands |= {"lacks": [sys.executable, "missing.py"], "mistyped": ["pyhton", "own_script.py"]}
    stop = {"metric": "val_loss", "patience": 200, "max_epochs": 100}
    members = [{"name": name, "command": words, "max_gpus": 1} for name, words in commands.items()]
    members[1]["stop"] = {"max_epochs": 3}
    ensemble = json.dumps({"name": "own", "stop": stop, "members": members})
    folder = tmp_path_factory.mktemp("fates")
    project = new_project(folder / "project", ensemble, environment={"HETCTL_SITE": "local"})
    shutil.copy(TINY / "own_script.py", project.path)
    rates = "".join(f"{name},1,1000,100\n" for name in commands)
    (project.path / "rates.csv").write_text("member,gpus,rate,samples\n" + rates)
    assert project.here("profile", "import", "rates.csv").code == 0
    done = project.here("submit", "--gpus", "2", "--wait", "--json", "--retries", "1")
    assert (done.code, done.json["state"]) == (5, "failed"), done
    wait_for(lambda: not alive(str(project.path)))
    return project, {member["member"]: member for member in done.json["members"]}


def test_a_script_trains_to_its_end(fates):
    project, members = fates
    assert project.epochs(RUN)["trained"] == [1, 2, 3, 4]
    assert members["trained"]["reason"] == "its command has ended with exit code 0"
    assert members["trained"]["best"] == 0.25
    assert events(project, "epoch", "trained")[1]["rate"] > 0


def test_the_stop_rule_ends_a_script(fates):
    project, members = fates
    assert members["ruled"]["reason"] == "3 epochs done"
    assert "stopped after 3 epochs" in log_of(project, "ruled")


@pytest.mark.parametrize(("harm", "cause"), [("child", "SIGKILL"), ("rank", "killed by SIGKILL")])
def test_a_killed_script_goes_on_from_its_checkpoint(fates, harm, cause):
    project, _ = fates
    assert project.epochs(RUN)[harm] == [1, 2, 3, 4]
    ends = [e.data for e in project.driver_events(RUN) if e.kind == "task_ended"]
    first = next(end for end in ends if end["member"] == harm)
    assert first["fault"]
    told = [event["error"] for event in events(project, "failed", harm)] or [first["description"]]
    assert told[0].endswith(cause)
    starts = [line for line in log_of(project, harm).splitlines() if line.startswith("named before")]
    state = checkpoint_folder(read_spec(project.home.run(RUN)), harm) / "epochs.txt"
    assert starts == ["named before: None", f"named before: {state}"]
    assert "start after 2 epochs" in log_of(project, harm)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("fails", "ended with exit code 1: the data are not there"),
        ("lacks", "can't open file"),
        ("mistyped", "program 'pyhton' of the command cannot be started: No such"),
    ],
)
def test_a_failed_script_has_its_last_error_as_cause(fates, name, cause):
    _, members = fates
    assert members[name]["state"] == "failed"
    assert cause in members[name]["reason"]


def test_garbage_among_the_reports_is_ignored(fates):
    project, _ = fates
    (ignored,) = events(project, "report_ignored", "garbage")
    assert ignored == {"line": "?[31m epoch one is done", "rule": "it is not JSON"}
    assert "is ignored: it is not JSON: ?[31m epoch one" in log_of(project, "garbage")
    assert project.epochs(RUN)["garbage"] == [1, 2]


def test_a_script_goes_on_in_the_next_job(tmp_path):
    project = project_of(tmp_path, "--epochs", "20", "--epoch-s", "1.5")
    # Longer than a job's start on a slow machine, and shorter than the epochs.
    done = submitted(project, "--time", "24s")
    assert (done.code, project.epochs(RUN)) == (0, {"a": list(range(1, 21))}), done
    assert len(done.json["jobs"]) > 1
    assert set(stopped_by(project)) == {"deadline"}
    assert "stopped after" in log_of(project)


def test_a_blind_script_is_run_again_and_told_of(tmp_path):
    project = project_of(tmp_path, "--epochs", "20", "--epoch-s", "1.5", "--harm", "blind")
    done = submitted(project, "--time", "24s")
    assert (done.code, project.epochs(RUN)) == (7, {}), done
    assert len(done.json["jobs"]) > 1
    assert "has reported no finished epoch" in project.here("status").stdout


def test_a_script_that_does_not_stop_is_killed(tmp_path):
    project = project_of(tmp_path, "--epochs", "10000", "--harm", "unresponsive", max_epochs=2)
    done = submitted(project, "--time", "20s")
    assert (done.code, done.json["members"][0]["reason"]) == (0, "2 epochs done"), done
    assert [line.rpartition(" ")[2] for line in log_of(project).splitlines() if "told to stop" in line] == [
        "SIGTERM",
        "SIGKILL",
        "(SIGKILL)",
    ]
    wait_for(lambda: not alive(str(project.path)))


def test_status_shows_a_script_within_its_epoch(tmp_path):
    project = project_of(tmp_path, "--epoch-s", "60", "--parts", "1000")
    assert project.here("submit", "--gpus", "1", "--json").code == 0

    def live_metrics():
        return project.here("status", "--json").json["members"][0]["live_metrics"]

    wait_for(live_metrics)
    seen = live_metrics()
    assert (seen["epoch"], 0 < seen["position"] < 100, seen["samples"]) == (1, True, 0)
    assert 0 < seen["rate"] < 5
    assert 0 < seen["loss"] <= 1
    assert "In training just now" in project.here("status").stdout
    assert project.here("cancel", "--json").code == 0
    assert project.epochs(RUN) == {}
    wait_for(lambda: not alive(str(project.path)))


STRANGER = f"""\
name: own
command: {sys.executable} stranger.py --out_dir={{checkpoint_dir}} --harm={{harm}}
ranks: none
preload: decimal
resume: {{checkpoint: ckpt.txt, options: --init_from=resume}}
members:
  - grid: {{name: a, over: {{harm: ["", yes]}}}}
"""


def test_a_script_that_knows_nothing_of_hetctl_is_resumed_without_a_profile(tmp_path):
    project = new_project(tmp_path / "project", STRANGER, environment={"HETCTL_SITE": "local"})
    shutil.copy(TINY / "stranger.py", project.path)
    done = submitted(project)
    assert (done.code, [member["state"] for member in done.json["members"]]) == (0, ["converged"] * 2), done
    starts = {
        name: re.findall("(.*) at step (.*)", project.home.run(RUN).log_of(name).read_text())
        for name in ("a-harm-", "a-harm-yes")
    }
    assert starts == {
        "a-harm-": [("scratch", "0")],
        "a-harm-yes": [("scratch", "0"), ("resume", "4")],
    }


def test_modules_are_imported_once_on_a_node_before_any_rank_starts(tmp_path):
    text = (
        f"name: own\ncommand: {sys.executable} see.py\npreload: slow\nmembers: [{{name: a}}, {{name: b}}]\n"
    )
    project = new_project(tmp_path / "project", text, environment={"HETCTL_SITE": "local"})
    (project.path / "slow.py").write_text(
        "import os\nopen('imports', 'a').write(os.environ.get('HETCTL_MEMBER', 'ahead of all '))"
    )
    (project.path / "see.py").write_text(
        "import os, slow, time; print('forked by', os.getppid()); time.sleep(1)"
    )
    assert submitted(project, "--gpus", "2").code == 0
    assert (project.path / "imports").read_text() == "ahead of all "
    pythons = {re.search("forked by .*", project.home.run(RUN).log_of(name).read_text())[0] for name in "ab"}
    assert len(pythons) == 1


def test_ranks_of_a_script_meet_by_horovod(tmp_path):
    rates = "member,gpus,rate,samples\na,2,100,2\n"
    project = project_of(tmp_path, script="own_horovod.py", gpus=2, rates=rates)
    file = project.path / "ensemble.yaml"
    file.write_text(file.read_text().replace("max_gpus: 2", "gpus: 2"))
    assert project.here("profile", "import", "rates.csv").code == 0
    done = project.here("submit", "--gpus", "2", "--wait", "--json", "--retries", "0")
    assert (done.code, project.epochs(RUN)) == (0, {"a": [1, 2]}), done
    assert [event["metrics"] for event in events(project, "epoch")] == [{"val_loss": 3, "ranks": 2}] * 2
