"""Commands on runs that are there: a finished one, one with a member that failed, and one that goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from workbench import pretending, pretending_project, wait_for

from hetctl.app.run import explain
from hetctl.cli.main import cli
from hetctl.storage.purge import remove_files

ENSEMBLE = pretending("duo", 2, a="{epochs: 2}", b="{epochs: 2}")
FAILING = pretending("duo", 2, a="{fail: true}", b="{epochs: 2}")
RATES = "member,gpus,rate,samples\na,1,100,400\nb,1,100,400\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with a finished run, and one of which a member has failed."""
    folder = tmp_path_factory.mktemp("runs")
    made = pretending_project(folder, ENSEMBLE)
    (made.path / "rates.csv").write_text(RATES)
    assert made.here("profile", "import", "rates.csv").code == 0
    assert made.here("submit", "--wait", "--json").json["state"] == "finished"
    (made.path / "ensemble.yaml").write_text(FAILING)
    assert made.here("profile", "import", "rates.csv").code == 0
    assert made.here("submit", "--new", "--retries", "1", "--wait").code == 5
    return made


def test_runs_lists_the_newest_first(project):
    failed, finished = project.here("runs", "--json").json["runs"]
    assert (failed["run"], failed["state"]) == ("duo-002", "failed")
    assert (finished["run"], finished["state"], finished["site"]) == ("duo-001", "finished", "local")
    results = finished["results"]
    assert (results["members"], results["converged"], results["failed"]) == (2, 2, 0)
    assert (results["metric"], results["best"], results["member"]) == ("val_accuracy", 0.02, "a")
    tasks = project.here("status", "duo-001", "--json").json["tasks"]
    used = sum((task["end_s"] - task["start_s"]) * len(task["gpus"]) for task in tasks)
    assert results["gpu_seconds"] == pytest.approx(used, rel=1e-3)
    assert results["cost"]["node_hours"] * 3600 > max(task["end_s"] for task in tasks) * 0.9
    assert results["cost"]["charged"] == results["cost"]["node_hours"]
    shown = project.here("runs").stdout
    assert shown.index("duo-002") < shown.index("duo-001")
    assert "1/2, 1 failed" in shown


def test_a_list_is_the_same_without_the_results_that_jobs_have_kept(project):
    kept = project.here("runs", "--json").json
    for run in project.home.every_run():
        run.results.rename(run.results.with_suffix(".away"))
    told = project.here("runs", "--json").json
    for run in project.home.every_run():
        run.results.with_suffix(".away").rename(run.results)
    assert told == kept


def test_logs_of_a_member_are_those_of_its_newest_round(project):
    folder = project.home.run("duo-002")
    log = folder.log_of("a")
    starts = [json.loads(line) for line in folder.events_of("driver").read_text().splitlines()]
    starts = [each for each in starts if each["kind"] == "task_started" and each["member"] == "a"]
    assert len(starts) == 2  # it was tried once more
    with log.open("ab") as file:
        file.write("täglich\n".encode() * 3)
    whole = log.read_text()
    assert project.here("logs", "duo-002", "a", "--all").stdout == whole
    newest = whole.encode()[starts[1]["log_start"] :].decode()
    assert project.here("logs", "a").stdout == newest
    first = project.here("logs", "duo-002", "a", "--round", str(starts[0]["round"])).stdout
    assert first + newest == whole
    assert project.here("logs", "a", "-n", "2", "--json").json["lines"] == ["täglich"] * 2
    refused = project.here("logs", "duo-002", "a", "--round", "7", "--json")
    assert refused.code == 2
    assert "its rounds" in refused.error["hint"]


def test_logs_lists_what_there_is(project):
    listed = project.here("logs", "duo-001", "--json").json
    assert [log["name"] for log in listed["jobs"]] == ["job 0", "agents of job 0"]
    assert {log["name"] for log in listed["members"]} == {"a", "b"}
    assert "duo-001" in project.here("logs", "duo-001").stdout
    job = project.here("logs", "duo-001", "--driver", "0").stdout
    assert job == project.home.run("duo-001").job(0).log.read_text()
    for wrong in (("logs", "nobody"), ("logs", "duo-001", "../b"), ("logs", "duo-003", "a"), ("logs", "-f")):
        assert project.here(*wrong).code == 2


def test_seeds_are_shown_together_and_compared_in_pairs(tmp_path):
    text = ENSEMBLE.replace("{name: a, max_gpus: 1, ", "{name: a, seeds: 3, max_gpus: 1, ")
    made = pretending_project(tmp_path, text)
    status = made.here("submit", "--wait", "--json").json
    assert list(status["states"]) == ["a", "a-seed-1", "a-seed-2", "b"]
    (group,) = status["seeds"]
    assert (group["group"], group["members"]) == ("a", ["a", "a-seed-1", "a-seed-2"])
    assert (group["best"]["count"], group["best"]["mean"]) == (3, pytest.approx(0.02))
    assert "Best val_accuracy over seeds" in made.here("status").stdout
    (made.path / "ensemble.yaml").write_text(text.replace("epochs: 2}", "epochs: 1}"))
    assert made.here("submit", "--new", "--wait").code == 0
    compared = made.here("compare", "duo-001", "duo-002", "--json").json
    (pair,) = compared["seeds"]
    assert (pair["run"], pair["other"], pair["difference"]["count"]) == ("duo-001", "duo-002", 3)
    assert pair["difference"]["mean"] == pytest.approx(-0.01)
    assert "-0.01" in made.here("compare", "duo-001", "duo-002").stdout


def test_runs_are_compared(project):
    compared = project.here("compare", "duo-001", "duo-002", "--json").json
    keys = {one["key"]: (one["members"], one["values"]) for one in compared["differences"]}
    assert keys["config.epochs"] == (["a"], [2, None])
    assert keys["config.fail"] == (["a"], [None, True])
    assert keys["retries"] == ([], [2, 1])
    one, other = compared["members"]["b"]
    assert (one["best"], one["epoch"], one["epochs"]) == (0.02, 2, 2) == (other["best"], other["epoch"], 2)
    assert compared["members"]["a"][1]["best"] is None
    assert "config.fail of a" in project.here("compare", "duo-001", "duo-002").stdout
    done = project.here("report", "duo-001", "duo-002", "-o", "both.html", "--json")
    assert done.json["runs"] == ["duo-001", "duo-002"]
    assert "config.fail" in (project.path / "both.html").read_text()
    assert project.here("compare", "duo-001").code == 2


def test_members_are_explained(project):
    done = project.here("explain", "duo-001", "a", "--json").json
    assert (done["state"], done["log_tail"]) == ("converged", [])
    assert "its stop rule is met: all epochs done" in done["reasons"]
    assert "hetctl change duo-001 a --max-epochs N" in done["next_step"]
    failed = project.here("explain", "a", "--json").json
    assert (failed["run"], failed["state"]) == ("duo-002", "failed")
    assert failed["reasons"][0] == "it failed: no such layer"
    assert any("program-error" in reason for reason in failed["reasons"])
    assert "hetctl retry duo-002 a" in failed["next_step"]
    assert "no such layer" in project.here("explain", "a").stdout
    assert project.here("explain", "duo-001", "c").code == 2


def test_shells_complete_runs_members_and_sites(project):
    def completed(*words):
        variables = {"COMP_WORDS": " ".join(("hetctl", *words)), "COMP_CWORD": str(len(words))}
        shown = project.hetctl(_HETCTL_COMPLETE="bash_complete", **variables)
        return [line.partition(",")[2] for line in shown.stdout.splitlines()]

    assert completed("status", "duo-") == ["duo-002", "duo-001"]
    assert completed("logs", "duo-001", "") == ["a", "b"]
    assert completed("submit", "--site", "per") == ["perlmutter"]
    assert "logs" in completed("lo")
    for shell in ("bash", "zsh", "fish"):
        assert "_HETCTL_COMPLETE" in project.here("completion", shell).stdout


def test_completion_opens_no_catalog(project):
    words = {"_HETCTL_COMPLETE": "bash_complete", "COMP_WORDS": "hetctl status ", "COMP_CWORD": "2"}
    command = [sys.executable, "-X", "importtime", "-m", "hetctl"]
    done = subprocess.run(
        *(command,),
        cwd=project.path,
        env={**os.environ, **words},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "duo-001" in done.stdout
    assert "sqlalchemy" not in done.stderr
    assert "pydantic" not in done.stderr


@pytest.fixture
def going_on(project):
    """A run whose members train until they are told."""
    text = ENSEMBLE.replace("{epochs: 2}", "{epochs: 2, held_after: 1, until: '%s'}" % (project.path / "go"))
    (project.path / "ensemble.yaml").write_text(text)
    assert project.here("profile", "import", "rates.csv").code == 0
    started = project.here("submit", "--new", "--json")
    assert started.code == 0, started.stdout
    run = started.json["run"]
    wait_for(lambda: project.epochs(run).get("a") == [1])
    yield run
    (project.path / "go").unlink(missing_ok=True)
    project.here("cancel", run)


def test_a_run_that_goes_on_is_listed_followed_and_not_removed(project, going_on, monkeypatch):
    (line, *_) = project.here("runs", "--json").json["runs"]
    assert (line["run"], line["state"], line["results"]["best"]) == (going_on, "running", 0.01)
    explained = project.here("explain", "a", "--json").json
    assert explained["state"] == "training"
    assert any(reason.startswith("planner ") for reason in explained["reasons"])
    # Of a large run the planner is not asked again.
    monkeypatch.setattr(explain, "MOST_PLANNED", 0)
    reasons = project.here("explain", "a", "--json").json["reasons"]
    assert "of all members 2 train, and 0 wait" in reasons
    assert not any(reason.startswith("planner ") for reason in reasons)
    refused = project.here("rm", going_on, "--yes", "--json")
    assert (refused.code, refused.error["kind"]) == (6, "locked")
    stopped = project.start("logs", "a", "-f")
    time.sleep(3)
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(60) == 130
    follower = project.start("logs", going_on, "a", "-f")
    with project.home.run(going_on).log_of("a").open("a") as file:
        file.write("appended\n")
    (project.path / "go").touch()
    shown, errors = follower.communicate(timeout=120)
    assert (follower.returncode, errors) == (0, "")
    assert shown.endswith("appended\n")
    assert project.here("status", going_on, "--json").json["state"] == "finished"


@pytest.fixture
def copied(project, tmp_path):
    shutil.copytree(project.path, tmp_path / "project", symlinks=True)
    return type(project)(tmp_path / "project", project.python, project.environment)


def test_a_removed_run_leaves_nothing(copied):
    assert copied.here("rm", "duo-001", "duo-001").code == 2  # nobody can be asked
    assert copied.here("rm", "duo-001", "no-such-run", "--yes").code == 2
    (removed,) = copied.here("rm", "duo-001", "--yes", "--json").json["removed"]
    assert removed["folder_bytes"] > removed["checkpoint_bytes"] > 0
    assert list(copied.home.path.glob("*/duo-001*")) == [copied.home.removed / "duo-001"]
    assert "duo-001" not in [line["run"] for line in copied.here("runs", "--json").json["runs"]]
    rebuilt = copied.here("catalog", "rebuild", "--json").json
    assert "duo-001" not in rebuilt["runs"]


@pytest.mark.parametrize("at", ["rename", "rmtree"])
def test_a_removal_that_was_killed_is_none_or_whole(copied, at):
    """As by a kill before the folder is moved, and while its files are removed."""

    def killed(*_, **__):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        target = "pathlib.Path.rename" if at == "rename" else "hetctl.storage.purge.shutil.rmtree"
        patch.setattr(target, killed)
        assert copied.here("rm", "duo-002", "--yes").code == 130
    assert copied.here("status").code == 0
    runs = copied.here("catalog", "rebuild", "--json").json["runs"]
    assert ("duo-002" in runs) is (at == "rename")
    if at == "rename":
        assert copied.here("explain", "duo-002", "b", "--json").json["state"] == "converged"
        assert copied.here("rm", "duo-002", "--yes").code == 0
    else:
        remove_files(copied.home, "duo-002")
    assert list(copied.home.path.glob("*/duo-002*")) == [copied.home.removed / "duo-002"]
    # Its jobs would be taken for those of another run of that name.
    assert copied.here("submit", "--new", "--dry-run", "--json").json["run"] != "duo-002"


def test_every_command_with_a_run_completes_it():
    context = cli.make_context("hetctl", ["status"])
    for name in ("status", "cancel", "advance", "report", "rm", "compare"):
        command = cli.get_command(context, name)
        assert any(parameter._custom_shell_complete for parameter in command.params), name
