"""Going on with an unfinished run: what may change takes effect, and the rest is refused by name."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from whole_folds import usage_of
from workbench import RATES, Kept, new_project, pretending_project

from hetctl.app.project import Waits
from hetctl.catalog.catalog import Catalog
from hetctl.model.events import DRIVER
from hetctl.model.job import JobState
from hetctl.storage.event_files import EventWriter
from hetctl.storage.kept_modules import with_kept_modules
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import read_spec

RUN = "trio-001"
SITE = """\
extends: slurm
nodes: 4
gpus_per_node: 2
cores_per_node: 8
memory_per_node: 4GB
account: ml-42
queues:
  - {name: short, max_nodes: 4, max_wall: 1h}
  - {name: long, max_nodes: 4, max_wall: 24h}
queue: short
"""
SUBMITTED = ["--gpus", "4", "--time", "1h"]
FAKES = {
    "sbatch": """\
test -e {folder}/refuse && echo 'Invalid account or account/partition combination specified' >&2 && exit 1
number=$(($(ls {folder}/jobs | wc -l) + 1)); cp "$2" {folder}/jobs/$number; echo $number""",
    "squeue": 'test -e {folder}/pending && echo "$(ls {folder}/jobs | tail -1)|PENDING|0:0|None||x"; exit 0',
    "sacct": 'for n in $(ls {folder}/jobs); do echo "$n|CANCELLED by 0|0:0|n1"; done',
    "scancel": "rm -f {folder}/pending",
}


@pytest.fixture(scope="module")
def submitted(tmp_path_factory):
    """A project with an unfinished run, whose only job has been cancelled before it began.

    Commands of its Slurm keep what it is given; its jobs are over unless a file says not.
    """
    made = new_project(tmp_path_factory.mktemp("submitted") / "project", waits=Waits(settle_s=0.1))
    slurm = made.path / "slurm"
    (slurm / "jobs").mkdir(parents=True)
    for name, text in FAKES.items():
        (slurm / name).write_text(f"#!/bin/bash\n{text.format(folder=slurm)}\n")
        (slurm / name).chmod(0o755)
    made.environment |= {"HETCTL_SITE": "lab", "PATH": f"{slurm}:/usr/bin:/bin"}
    (made.path / "site-configs").mkdir()
    (made.path / "site-configs" / "lab.yaml").write_text(SITE)
    assert made.here("profile", "import", "rates.csv").code == 0
    assert made.here("submit", *SUBMITTED).code == 0
    assert made.here("cancel").code == 0
    return Kept(made)


@pytest.fixture
def project(submitted, monkeypatch):
    made = submitted.restored()
    monkeypatch.setenv("PATH", made.environment.pop("PATH"))
    return made


@pytest.fixture
def slurm(project):
    return project.path / "slurm"


def edit(project, file, old, new):
    path = project.path / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def edit_site(project, old, new):
    edit(project, "site-configs/lab.yaml", old, new)


def spec_of(project):
    spec = read_spec(project.home.run(RUN))
    with Catalog.open_to_read(project.home.catalog) as catalog:
        assert catalog.run(RUN).spec == spec
    return spec


def scripts(slurm):
    return [path.read_text() for path in sorted((slurm / "jobs").iterdir())]


def changed(project, *arguments):
    """Go on; return what is said of each change, which is the same for people and in a dry run."""
    shown = project.here("submit", "--dry-run", *arguments)
    assert shown.code == 0, shown.stderr
    dry = re.findall(r"^# (.*: .* \(was .*\))$", shown.stderr, re.M)
    done = project.here("submit", *arguments)
    assert done.code == 0, done.stderr
    said = re.findall(r"^(.* \(was .*\))$", done.stdout, re.M)
    assert said == dry
    return said


def refused(project, code, *arguments):
    """Try to go on; return the error, which is that of a dry run, and after which all is as it was."""
    before = project.tree()
    error = project.here("submit", *arguments, "--json")
    assert error.code == code, error.stdout
    assert project.here("submit", *arguments, "--dry-run", "--json").error == error.error
    assert project.tree() == before
    return error.error


def test_what_was_named_by_an_option_outlives_the_site_file(project, slurm):
    named = changed(project, "--account", "ml-43", "--queue", "short", "--launch", "members")
    assert set(named) == {"account: ml-43 (was ml-42)", "launch: members (was nodes)"}
    assert project.here("cancel").code == 0
    edit_site(project, "account: ml-42", "account: ml-44")
    edit_site(project, "queue: short", "queue: long")
    assert changed(project) == ["the site's queue: long (was short)"]
    assert "--account=ml-43\n" in scripts(slurm)[-1]
    assert "--partition=short\n" in scripts(slurm)[-1]
    assert spec_of(project).site.launch == "members"


def test_without_a_word_a_run_goes_on_as_it_is(project, slurm):
    before = spec_of(project)
    assert changed(project) == []
    assert spec_of(project) == replace(before, earlier_jobs=1)
    assert project.here("cancel").code == 0
    assert changed(project, *SUBMITTED, "--site", "lab", "--planner", "fluid") == []
    first, second, _ = scripts(slurm)
    assert "--account=ml-42" in second
    assert second.count("\n") == first.count("\n")


@pytest.mark.parametrize(
    ("arguments", "said", "in_script"),
    [
        (["--account", "ml-43"], ["account: ml-43 (was ml-42)"], "#SBATCH --account=ml-43\n"),
        (["--gpus", "2"], ["gpus: 2 (was 4)"], "#SBATCH --nodes=1\n"),
        (["--launch", "members"], ["launch: members (was nodes)"], ""),
        (["--time", "30m"], ["time: 30m (was 1h)"], "#SBATCH --time=00:30:00\n"),
        (
            ["--queue", "long", "--time", "5h"],
            ["queue: long (was short)", "time: 5h (was 1h)"],
            "#SBATCH --partition=long\n",
        ),
        (["--retries", "5"], ["retries: 5 (was 2)"], ""),
        (["--chain"], ["chain: true (was false)"], "--queue-next-after"),
        (["--job-option", "qos=debug"], ['job_options: {"qos": "debug"} (was none)'], "--qos=debug\n"),
        (["--max-jobs", "7"], ["max_jobs: 7 (was none)"], ""),
    ],
)
def test_changed_options_take_effect_in_the_next_job(project, slurm, arguments, said, in_script):
    assert changed(project, *arguments) == said
    assert in_script in scripts(slurm)[-1]
    assert in_script == "" or in_script not in scripts(slurm)[0]


def test_an_option_that_the_batch_system_has_not_is_refused_before_a_job_is_rendered(project):
    done = project.here("change", "--job-option", "quality=high", "--json")
    assert (done.code, "'quality' is none of slurm's: begin" in done.error["message"]) == (2, True)
    assert spec_of(project).site.job_options == {}
    done = project.here("change", "--job-option", "quality", "--json")
    assert (done.code, "NAME=VALUE" in done.error["message"]) == (2, True)


def test_a_command_says_which_jobs_a_change_is_of(project):
    assert project.here("submit").code == 0
    assert (
        "the next job is submitted so" in project.here("change", "--queue", "long", "--json").json["reason"]
    )
    assert "heeds it at once" in project.here("change", "--retries", "5", "--json").json["reason"]


def test_variables_take_effect_as_options_do(project, slurm):
    done = project.here("submit", "--json", HETCTL_ACCOUNT="ml-43", HETCTL_TIME="20m")
    assert {change["what"]: (change["now"], change["was"]) for change in done.json["changed"]} == {
        "time": (1200, 3600),
        "account": ("ml-43", "ml-42"),
    }
    assert "#SBATCH --account=ml-43\n" in scripts(slurm)[-1]
    assert spec_of(project).grace_s == 60


@pytest.mark.parametrize(
    ("old", "new", "said", "in_script"),
    [
        ("account: ml-42", "account: ml-43", "account: ml-43 (was ml-42)", "--account=ml-43\n"),
        ("account: ml-42\n", "", "account: none (was ml-42)", "#SBATCH --nodes=2\n"),
        ("queue: short", "directives: ['--constraint=a']\nqueue: short", "directives: ", "--constraint=a\n"),
        ("queue: short", "setup: [echo hello]\nqueue: short", "setup: ", "echo hello\n"),
        ("queue: short", "environment: {A: b}\nqueue: short", "environment: ", "export A=b\n"),
        ("queue: short", "queue: long", "queue: long (was short)", "--partition=long\n"),
        ("max_wall: 1h", "max_wall: 2h", "queues: ", "--time=01:00:00\n"),
        ("nodes: 4\ngpus", "nodes: 3\ngpus", "nodes: 3 (was 4)", "#SBATCH --nodes=2\n"),
    ],
)
def test_edits_of_the_site_file_take_effect(project, slurm, old, new, said, in_script):
    edit_site(project, old, new)
    assert changed(project)[0].startswith(said)
    assert in_script in scripts(slurm)[-1]


def test_the_size_is_kept_when_queues_are_others_or_refused(project):
    edit_site(project, "max_wall: 1h", "max_wall: 30m")
    error = refused(project, 3)
    assert "site lab" in error["message"]
    assert changed(project, "--time", "30m")[0] == "time: 30m (was 1h)"


def kept_text(project):
    """What the next job would import."""
    folder = project.home.run(RUN)
    return (Path(with_kept_modules(spec_of(project), folder).ensemble.folder) / "nets.py").read_text()


def test_a_run_goes_on_with_the_modules_as_submitted(project):
    submitted = (project.path / "nets.py").read_text()
    edit(project, "nets.py", "def model_fn", "def other(): ...\n\n\ndef model_fn")
    error = refused(project, 2)
    assert "nets.py" in error["message"]
    assert "--modules kept" in error["hint"]
    assert changed(project, "--modules", "kept") == []
    # It was said once, and holds.
    assert project.here("cancel").code == 0
    assert changed(project) == []
    assert kept_text(project) == submitted


def test_modules_that_no_function_imports_hold_up_nothing(project):
    before = spec_of(project).modules
    (project.path / "notes.py").write_text("import nets")
    assert changed(project) == []
    assert spec_of(project).modules == before


def test_edited_modules_are_taken_over_where_that_is_said(project):
    edit(project, "nets.py", "def model_fn", "def other(): ...\n\n\ndef model_fn")
    (project.path / "later.py").write_text("")
    assert changed(project, "--modules", "edited") == [
        "later.py: there (was not there)",
        "nets.py: edited (was as submitted)",
    ]
    assert kept_text(project) == (project.path / "nets.py").read_text()
    assert project.here("cancel").code == 0
    assert changed(project) == []


@pytest.mark.parametrize("budget", [["--max-jobs", "1"], ["--max-rounds", "1"], ["--gpu-hours", "0.5"]])
def test_a_budget_is_granted_anew_to_a_continued_run(project, slurm, budget):
    driver = EventWriter(project.home.run(RUN).events, DRIVER, 0)
    placement = [{"node": "n1", "gpus": [0]}]
    driver.write("job_started", job=0, batch_id="1")
    driver.write("round_started", job=0, predicted_s=1.0, members=["a"])
    driver.write("task_started", member="a", gpus=1, placement=placement)
    hour_ago = str(time.time() - 3600)
    path = driver.path
    path.write_text(re.sub(r'"time": [0-9.]+', f'"time": {hour_ago}', path.read_text()))
    told = {"exit_code": 0, "reason": "told", "description": "", "fault": False}
    driver.write("task_ended", member="a", **told)
    driver.write("job_ended", job=0, reason="finished")
    done = project.here("submit", *budget)
    assert (done.code, "follow it with" in done.stdout) == (0, True)
    assert len(scripts(slurm)) == 2
    # The driver of the job goes by the same.
    budget, used = spec_of(project).budget, usage_of(events_in(project.home.run(RUN)), time.time())
    assert (used.rounds, used.gpu_seconds > 3500, budget.exceeded(used)) == (1, True, None)


def test_a_removed_folder_is_named_with_what_is_left_to_do(project, slurm):
    shutil.rmtree(project.home.run(RUN).path)
    for command in (["status"], ["report"], ["advance"], ["submit"], ["submit", "--dry-run"]):
        told = project.here(*command)
        assert (told.code, "hetctl submit --new" in told.stderr) == (2, True)
    assert not project.home.run(RUN).path.exists()
    assert "hetctl submit --new" in project.here("cancel").stdout
    assert project.here("submit", "--new").code == 0
    assert len(scripts(slurm)) == 2


def test_jobs_of_a_copied_project_have_names_of_their_own(project, slurm, tmp_path):
    """By its name a copy would take a job of the original for its own."""
    copy = replace(project, path=shutil.copytree(project.path, tmp_path / "copy"))
    for made in (project, copy):
        assert made.here("submit", "--new").code == 0
    names = [re.search(r"--job-name=(hetctl-trio-002-0-\S+)", text)[1] for text in scripts(slurm)[-2:]]
    assert len(set(names)) == 2


def test_limits_of_epochs_may_be_raised(project):
    edit(project, "ensemble.yaml", "patience: 50, max_epochs: 4", "patience: 60, max_epochs: 8")
    assert changed(project) == ["patience of a, b, c: 60 (was 50)", "max_epochs of a, b, c: 8 (was 4)"]
    assert {member.stop.max_epochs for member in spec_of(project).ensemble.members} == {8}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("name: b, config: {}", "name: b, config: {lr: 0.1}", "config of b"),
        ("name: b, config: {}", "name: d, config: {}", "member b"),
        ("members:", "batch_size: 8\nmembers:", "batch_size of a, b, c"),
        ("members:", "seed: 8\nmembers:", "seed of a"),
        ("members:", "data: elsewhere\nmembers:", "data"),
        ("framework: tensorflow", "framework: pytorch", "framework"),
        ("mode: max", "mode: min", "mode of a, b, c"),
    ],
)
def test_edits_of_members_are_refused(project, old, new, said):
    edit(project, "ensemble.yaml", old, new)
    error = refused(project, 2)
    assert said in error["message"]
    assert "--new" in error["hint"]
    (project.path / "rates.csv").write_text(RATES.replace("b,", "d,") if "name: d" in new else RATES)
    assert project.here("profile", "import", "rates.csv").code == 0
    new_run = project.here("submit", "--new", *SUBMITTED, "--json")
    assert (new_run.code, new_run.json["run"]) == (0, "trio-002")


def test_edits_of_kept_site_keys_are_refused_beside_all_others(project):
    edit_site(project, "gpus_per_node: 2", "gpus_per_node: 4")
    edit(project, "ensemble.yaml", "name: b, config: {}", "name: b, config: {lr: 0.1}")
    lines = refused(project, 2, "--planner", "doubling")["message"].splitlines()
    assert [line.split(" differs")[0].split(",")[0] for line in lines] == [
        "run trio-001 has planner fluid",
        "gpus_per_node",
        "config of b",
    ]


def test_a_broken_template_is_refused_before_anything_is_written(project):
    edit_site(project, "queue: short", "template: none.sh.j2\nqueue: short")
    assert "none.sh.j2" in refused(project, 2)["message"]


def test_jobs_in_which_nothing_can_be_done_are_refused(project):
    assert refused(project, 3, "--time", "1s")["kind"] == "infeasible"


def test_a_run_that_slurm_refuses_is_as_it_was(project, slurm):
    before = spec_of(project)
    (slurm / "refuse").touch()
    failed = project.here("submit", "--account", "ml-43", "--json")
    assert failed.code == 4
    assert spec_of(project) == before
    (slurm / "refuse").unlink()
    assert changed(project, "--account", "ml-43") == ["account: ml-43 (was ml-42)"]


def test_what_is_under_way_cannot_be_changed(project, slurm):
    (slurm / "pending").touch()
    assert project.here("submit").code == 0
    before = spec_of(project)
    locked = project.here("submit", "--account", "ml-43", "--json")
    assert (locked.code, locked.error["kind"]) == (6, "locked")
    assert "job 2" in locked.error["message"]
    assert "`change`" in locked.error["hint"]
    assert spec_of(project) == before


def test_a_job_whose_driver_has_ended_does_not_hold_up_the_next(project, slurm):
    """Its script still runs for a moment, so the next job waits for it; a requeued one trains again."""
    (slurm / "pending").touch()
    assert project.here("submit").code == 0
    events = EventWriter(project.home.run(RUN).events, DRIVER, 0)
    job = {"job": 1, "batch_id": "2", "nodes": [], "deadline": 1e10}
    for kind, data in (
        ("job_started", job),
        ("job_ended", {"job": 1, "reason": "signal"}),
        ("job_started", job),
    ):
        events.write(kind, **data)
    assert project.here("submit", "--json").error["kind"] == "locked"
    events.write("job_ended", job=1, reason="deadline")
    assert project.here("submit", "--account", "ml-43").code == 0
    assert "#SBATCH --dependency=afterany:2\n" in scripts(slurm)[2]
    assert "#SBATCH --account=ml-43\n" in scripts(slurm)[2]


@pytest.fixture
def in_doubt(project):
    """The same as a crash leaves it between the entry of its job and the call of sbatch."""
    with Catalog.open(project.home.catalog) as catalog:
        (job,) = catalog.jobs(RUN)
        fields = {**vars(job), "state": JobState.SUBMITTING, "batch_id": ""}
        catalog.save_job(RUN, type(job)(**fields))
        catalog.set_run_state(RUN, "queued")
    return project


def test_a_job_in_doubt_is_submitted_with_the_changes_if_lost(in_doubt, slurm):
    assert changed(in_doubt, "--gpus", "2", "--account", "ml-43") == [
        "gpus: 2 (was 4)",
        "account: ml-43 (was ml-42)",
    ]
    assert "--account=ml-43\n" in scripts(slurm)[-1]
    with Catalog.open_to_read(in_doubt.home.catalog) as catalog:
        (job,) = catalog.jobs(RUN)
    assert (job.nodes, job.batch_id) == (1, "2")


def test_a_job_that_slurm_has_all_the_same_cannot_be_changed(in_doubt, slurm):
    before = spec_of(in_doubt)
    with Catalog.open_to_read(in_doubt.home.catalog) as catalog:
        name = catalog.jobs(RUN)[0].name
    (slurm / "squeue").write_text(
        f'#!/bin/bash\ncase "$*" in *%j*) echo "1|{name}";; *) echo "1|PENDING|0:0|None||x";; esac\n'
    )
    locked = in_doubt.here("submit", "--account", "ml-43", "--json")
    assert (locked.code, locked.error["kind"]) == (6, "locked")
    assert spec_of(in_doubt) == before
    assert len(scripts(slurm)) == 1


def test_a_run_needs_no_site_to_be_named_again(project, slurm):
    """Not even here, where sbatch is on the PATH."""
    project.environment.clear()
    assert changed(project) == []
    assert len(scripts(slurm)) == 2


def test_a_site_that_was_named_by_its_file_is_read_from_there(project, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "lab.yaml"
    file.write_text(SITE.replace("ml-42", "ml-50"))
    assert changed(project, "--site", str(file)) == ["account: ml-50 (was ml-42)"]
    assert project.here("cancel").code == 0
    project.environment.clear()
    assert changed(project) == []
    file.write_text(SITE.replace("ml-42", "ml-51"))
    assert project.here("cancel").code == 0
    assert changed(project) == ["account: ml-51 (was ml-50)"]


def test_a_planner_that_auto_has_chosen_stands_for_auto(project):
    assert project.here("submit", "--new", *SUBMITTED, "--planner", "auto").code == 0
    assert project.here("cancel").code == 0
    assert project.here("submit", "--planner", "auto", "--dry-run").code == 0
    chosen = read_spec(project.home.run("trio-002")).planner
    assert project.here("submit", "--planner", chosen, "--dry-run").code == 0


def test_a_dry_run_names_a_job_that_is_not_known_to_be_over(project, slurm):
    (slurm / "pending").touch()
    assert project.here("submit").code == 0
    shown = project.here("submit", "--dry-run")
    assert "# job 2" in shown.stderr
    assert "--dependency" not in shown.stdout
    assert f"{RUN}-2-" in shown.stdout


def test_a_dry_run_shows_the_first_round_of_the_next_job(project):
    rates = "".join(f"{name},{gpus},{100 * gpus},400000\n" for name in "abc" for gpus in (1, 2, 4))
    (project.path / "rates.csv").write_text(f"member,gpus,rate,samples\n{rates}")
    assert project.here("profile", "import", "rates.csv").code == 0
    first = project.here("submit", "--new", "--dry-run", "--json", *SUBMITTED).json["packing"]
    assert len(first) == 2
    assert project.here("submit", "--new", *SUBMITTED).code == 0
    assert project.here("cancel").code == 0
    # Nothing is trained yet, so that the next job begins as the first one did.
    assert project.here("submit", "--dry-run", "--json").json["packing"] == first
    shown = project.here("submit", "--dry-run", "--json", "--gpus", "8").json
    assert [line.split(":")[0] for line in shown["packing"]] == [f"node-{number}" for number in range(4)]


LIMITED = """\
name: trio
framework: tensorflow
functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}
stop: {metric: val_accuracy, mode: max, patience: 50, max_epochs: 3}
members:
  - {name: a, max_gpus: 1, config: {to_the_limit: true}}
  - {name: b, max_gpus: 1, config: {no_room: true}, stop: {max_epochs: 40}}
"""


def test_a_member_at_its_epoch_limit_continues_when_it_is_raised(tmp_path):
    project = pretending_project(tmp_path, LIMITED)
    (project.path / "rates.csv").write_text("member,gpus,rate,samples\na,1,100,400\nb,1,100,400\n")
    assert project.here("profile", "import", "rates.csv").code == 0
    first = project.here("submit", "--max-jobs", "1", "--wait", "--json").json
    assert [member["state"] for member in first["members"]] == ["converged", "waiting"]
    assert project.epochs()["a"] == [1, 2, 3]
    edit(project, "ensemble.yaml", "max_epochs: 3", "max_epochs: 5")
    second = project.here("submit", "--max-jobs", "2", "--wait", "--json").json
    assert [change["what"] for change in second["changed"]] == ["max_jobs", "max_epochs of a"]
    assert project.epochs()["a"] == [1, 2, 3, 4, 5]
    assert second["members"][0]["reason"] == "5 epochs done"
