"""What other programs rely on: JSON, exit codes, precedence, help and completion."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from itertools import pairwise

import click
import pytest
from workbench import RATES, TIMEOUT_S, new_project

from hetctl.cli.main import COMMANDS, cli

LOCAL = {"HETCTL_SITE": "local"}
TWO_FRAMEWORKS = """\
name: two
framework: pytorch
functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}
members:
  - {name: a}
  - {name: b, framework: tensorflow}
"""
PLAN_KEYS = {
    "schema_version", "planner", "objective", "gpus", "gpus_per_node", "predicted_makespan_s",
    "lower_bound_s", "ratio", "rounds",
}  # fmt: skip


@pytest.fixture
def project(tmp_path):
    project = new_project(tmp_path / "project")
    assert project.here("profile", "import", "rates.csv", **LOCAL).code == 0
    return project


def test_the_plan_has_the_keys_that_were_promised(project):
    plan = project.here("plan", "--json", **LOCAL).json
    assert plan.keys() >= PLAN_KEYS
    for index, one in enumerate(plan["rounds"]):
        assert one["index"] == index
        assert one.keys() >= {"index", "predicted_s", "allocations"}
        for allocation in one["allocations"]:
            assert allocation.keys() >= {"member", "gpus", "mode", "rate", "placement"}
            assert sum(len(place["gpus"]) for place in allocation["placement"]) == allocation["gpus"]
    assert plan["ratio"] == pytest.approx(plan["predicted_makespan_s"] / plan["lower_bound_s"])
    planned = {a["member"] for one in plan["rounds"] for a in one["allocations"]}
    assert planned == {"a", "b", "c"}


@pytest.mark.parametrize("planner", ["flotilla", "independent"])
def test_the_same_plan_comes_out_every_time(project, planner):
    arguments = ("plan", "--planner", planner, "--seed", "3", "--json")
    assert project.here(*arguments, **LOCAL).stdout == project.here(*arguments, **LOCAL).stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["profile", "show"],
        ["profile", "import", "rates.csv"],
        ["render"],
        ["submit", "--dry-run"],
        ["sites"],
    ],
)
def test_every_result_is_one_json_object_with_its_schema(project, arguments):
    done = project.here(*arguments, "--json", **LOCAL)
    assert (done.code, done.json["schema_version"], done.stderr) == (0, 1, "")
    for_people = project.here(*arguments, **LOCAL)
    assert for_people.code == 0
    assert for_people.stdout
    assert "\x1b" not in for_people.stdout + for_people.stderr


@pytest.mark.parametrize("arguments", [["submit", "--dry-run"], ["render"], ["profile", "show"], ["sites"]])
def test_commands_that_only_show_write_nothing(project, arguments):
    before = project.tree()
    assert project.here(*arguments, **LOCAL).code == 0
    assert project.tree() == before


def test_a_dry_run_prints_the_script_and_the_submit_command(project):
    done = project.here("submit", "--dry-run", **LOCAL)
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "hetctl.runtime.driver" in done.stdout
    assert "trio-001/job-0000.sh" in done.stderr
    assert "# submit with: " in done.stderr
    assert "-m hetctl.runtime.agent " in done.stderr
    assert "# first round, node-0: " in done.stderr
    shown = project.here("submit", "--dry-run", "--json", **LOCAL).json
    assert shown["script"] == done.stdout
    (step,) = shown["steps"]
    assert (step["name"], step["argv"][2], len(shown["packing"])) == ("agents", "hetctl.runtime.agent", 1)
    assert project.here("render", "--json", **LOCAL).json["packing"] == shown["packing"]
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0


def test_a_dry_run_shows_each_member_s_step_of_the_first_round(project):
    members = {"HETCTL_LAUNCH": "members", **LOCAL}
    shown = project.here("submit", "--dry-run", "--planner", "independent", "--json", **members).json
    placed = [part.split(" on ")[0] for line in shown["packing"] for part in line.split(": ")[1].split("; ")]
    assert [step["name"] for step in shown["steps"]] == [f"round-0000/{member}" for member in placed]
    for step in shown["steps"]:
        assert step["argv"][4:6] == ["--step", step["name"]]
    said = project.here("submit", "--dry-run", "--planner", "independent", **members).stderr
    assert said.count("# the driver starts the step round-0000/") == len(placed) == 2


@pytest.mark.parametrize(
    ("launch", "imported"),
    [
        ("nodes", {"agents": ["pytorch", "tensorflow"]}),
        ("members", {"round-0000/a": ["pytorch"], "round-0000/b": ["tensorflow"]}),
    ],
)
def test_steps_import_the_frameworks_of_their_members(tmp_path, launch, imported):
    project = new_project(tmp_path / "project", TWO_FRAMEWORKS)
    (project.path / "two.csv").write_text("member,gpus,rate,samples\na,1,100,1000\nb,1,100,1000\n")
    assert project.here("profile", "import", "two.csv", **LOCAL).code == 0
    options = ("--dry-run", "--planner", "independent", "--launch", launch, "--json")
    shown = project.here("submit", *options, **LOCAL).json
    frameworks = {
        step["name"]: [each for option, each in pairwise(step["argv"]) if option == "--framework"]
        for step in shown["steps"]
    }
    assert frameworks == imported


def test_rendering_by_members_shows_the_step_of_one(tmp_path):
    project = new_project(tmp_path / "project")
    options = ("--gpus", "12", "--time", "2h", "--account", "ABC123", "--launch", "members", "--json")
    shown = project.here("render", "--site", "summit", *options).json
    (step,) = shown["steps"]
    assert step["name"] == "round-0000/a"
    assert step["argv"][:6] == [
        *("jsrun", "--nrs=1", "--rs_per_host=1", "--tasks_per_rs=1", "--cpu_per_rs=7", "--gpu_per_rs=1"),
    ]


def test_rendering_needs_no_catalog_and_no_machine(tmp_path):
    project = new_project(tmp_path / "project")
    done = project.here("render", "--site", "summit", "--gpus", "12", "--time", "2h", "--account", "ABC123")
    assert done.code == 0
    assert "#BSUB -P ABC123" in done.stdout
    assert not project.home.path.exists()


def test_what_is_exported_can_be_imported(project):
    exported = project.here("profile", "export", **LOCAL).stdout
    assert exported.splitlines()[0].startswith("member,gpus,rate")
    assert len(exported.splitlines()) == len(RATES.splitlines())
    (project.path / "again.csv").write_text(exported)
    assert project.here("profile", "import", "again.csv", **LOCAL).code == 0
    assert project.here("profile", "export", **LOCAL).stdout == exported


def test_the_home_can_lie_elsewhere(tmp_path):
    project = new_project(tmp_path / "project")
    home = {"HETCTL_HOME": str(tmp_path / "elsewhere"), **LOCAL}
    assert project.here("profile", "import", "rates.csv", **home).code == 0
    assert (tmp_path / "elsewhere" / "catalog.db").exists()
    assert not project.home.path.exists()
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "elsewhere" / "catalog.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("flags", "environment", "gpus"),
    [
        ([], {}, 2),
        ([], {"HETCTL_GPUS": "1"}, 1),
        (["--gpus", "2"], {"HETCTL_GPUS": "1"}, 2),
    ],
)
def test_a_flag_comes_before_its_variable(project, flags, environment, gpus):
    assert project.here("plan", "--json", *flags, **LOCAL, **environment).json["gpus"] == gpus


def test_a_flag_takes_precedence_over_its_environment_variable(tmp_path):
    project = new_project(tmp_path / "project")
    environment = {"HETCTL_SITE": "slurm", "HETCTL_TIME": "1h"}
    from_environment = project.here("render", **environment).stdout
    assert "#SBATCH --time=01:00:00\n" in from_environment
    assert "#SBATCH --time=03:00:00\n" in project.here("render", "--time", "3h", **environment).stdout
    assert "#SBATCH" not in project.here("render", "--site", "local", **environment).stdout
    assert project.here("render", **environment | {"HETCTL_TIME": "soon"}).code == 2


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_the_module_and_the_command_are_the_same(arguments):
    as_module = subprocess.run(
        [sys.executable, "-m", "hetctl", *arguments], capture_output=True, text=True, check=True
    )
    assert all(name in as_module.stdout for name in COMMANDS)
    assert as_module.stdout.startswith("Usage: hetctl ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(tmp_path, name):
    project = new_project(tmp_path / "project")
    shown = project.here(name, "--help")
    assert shown.code == 0
    assert f"Example: hetctl {name}" in shown.stdout.replace("\n", " ")
    assert "None]" not in shown.stdout


@pytest.mark.parametrize(
    ("shell", "said"), [("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete")]
)
def test_each_shell_gets_a_script_for_its_completion(tmp_path, shell, said):
    project = new_project(tmp_path / "project")
    printed = project.hetctl(_HETCTL_COMPLETE=f"{shell}_source")
    assert printed.code == 0
    assert said in printed.stdout


def test_completing_a_command_and_an_option(tmp_path):
    project = new_project(tmp_path / "project")
    words = {"_HETCTL_COMPLETE": "bash_complete"}
    command = project.hetctl(COMP_WORDS="hetctl pl", COMP_CWORD="1", **words)
    assert command.stdout.split() == ["plain,plan"]
    option = project.hetctl(COMP_WORDS="hetctl plan --gp", COMP_CWORD="2", **words)
    assert option.stdout.split() == ["plain,--gpus"]


def test_a_reader_that_goes_away_is_not_worth_a_word(project):
    process = project.start("sites", "--json", **LOCAL)
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=TIMEOUT_S)
    assert stderr == ""


def walk(command, words):
    yield ("hetctl", *words), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from walk(command.get_command(context, name), (*words, name))


HELPS = {" ".join(words): command for words, command in walk(cli, ())}


@pytest.mark.parametrize("name", HELPS)
def test_a_help_has_its_example_after_one_sentence(name):
    summary, example, *_ = inspect.cleandoc(HELPS[name].help).split("\n\n")
    assert summary[0].isupper()
    assert example.startswith("\b\nExample:")


def test_a_command_that_needs_a_package_of_an_extra_says_which(project):
    code = "import sys; sys.modules['ortools'] = None; from hetctl.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "plan", "--site", "local", "--planner", "static", "--json"]
    done = subprocess.run(command, cwd=project.path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["hint"] == "pip install 'hetctl[solvers]'"
    assert "Traceback" not in done.stderr
