"""What scripts are made of, and scripts as they run."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.cluster.render import JobScript, render_job, submit_command
from hetctl.model.errors import BadInputError
from hetctl.model.job import PROBE, PROFILE
from hetctl.model.site import MEMBERS, Queue, ResourceRequest, Site
from hetctl.storage.paths import Home, RunFolder

GIB = 2**30

SITES = {
    "slurm": Site(
        *("slurm", "slurm", "srun", 16, 4, 64, 512 * GIB, (Queue("gpu", 8, 86400),)),
        account="ml-42",
        setup=("module load cuda/12.4", "source ~/venv/bin/activate"),
        directives=("--constraint=a100",),
        environment={"NCCL_DEBUG": "WARN", "NOTE": "two words, a 'quote' and $HOME"},
        mpi="pmix",
    ),
    "slurm-docker": Site(
        *("slurm-docker", "slurm", "srun", 2, 2, 2, 2 * GIB, (Queue("normal"),)),
        device="slot",
        python="/opt/hetctl/bin/python",
        mpi="pmix",
    ),
    "summit": Site(
        *("summit", "lsf", "jsrun", 4608, 6, 42, 512 * GIB, (Queue("batch", None, 86400),)),
        account="ABC123",
        template="summit.sh.j2",
        setup=("module load open-ce/1.5.2-py38-0",),
        directives=('-alloc_flags "smt1"',),
    ),
    "local": Site("local", "local", "local", 1, 2, 2, 4 * GIB, (Queue("main"),), device="slot"),
}


HOME = Path("/home/ann/digits/.hetctl")


def job(site: Site, **changes: Any) -> JobScript:
    script = JobScript(
        folder=Home(HOME).run("digits-1"),
        job=2,
        name="digits-1-2",
        site=site,
        queue=site.queues[0],
        nodes=min(site.nodes, 2),
        wall_s=5430,
        grace_s=90,
        python="/home/ann/venv/bin/python",
        home=HOME,
    )
    return dataclasses.replace(script, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "command"),
    [
        ("slurm", {}, ("sbatch", "--parsable")),
        ("summit", {}, ("bsub",)),
        ("local", {}, ("bash",)),
    ],
)
def test_by_file_the_script_is_named_to_the_batch_system(
    name: str, changes: dict[str, Any], command: tuple[str, ...]
) -> None:
    path = "/home/ann/digits/.hetctl/runs/digits-1/job-0002.sh"
    assert submit_command(job(SITES[name], **changes)) == (*command, path)


def test_by_stdin_the_command_names_no_script() -> None:
    assert submit_command(job(dataclasses.replace(SITES["summit"], submit_by="stdin"))) == ("bsub",)


@pytest.mark.parametrize(("wall_s", "limit"), [(60, "0:01"), (61, "0:02"), (7200, "2:00"), (86401, "24:01")])
def test_lsf_rounds_the_limit_up_to_minutes(wall_s: int, limit: str) -> None:
    text = render_job(job(SITES["summit"], wall_s=wall_s, grace_s=0))
    assert f"#BSUB -W {limit}\n" in text


@pytest.mark.parametrize(("name", "wall_s", "grace_s"), [("slurm", 60, 60), ("summit", 110, 70)])
def test_a_grace_as_long_as_the_limit_is_refused(name: str, wall_s: int, grace_s: int) -> None:
    with pytest.raises(BadInputError, match="must be shorter than the limit"):
        render_job(job(SITES[name], wall_s=wall_s, grace_s=grace_s))


def test_tmpdir_is_refused_where_it_breaks_jsrun() -> None:
    with pytest.raises(BadInputError, match="TMPDIR"):
        render_job(job(dataclasses.replace(SITES["summit"], environment={"TMPDIR": "/tmp"})))


def test_a_percent_sign_in_a_path_is_no_pattern_of_slurm() -> None:
    assert "/a%%j/runs/" in render_job(job(SITES["slurm"], folder=RunFolder(Path("/a%j/runs/r"))))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("slurm", {"name": "x\n#SBATCH --exclusive"}),
        ("slurm", {"name": ""}),
        ("slurm", {"name": "back\\slash"}),
        ("slurm", {"folder": RunFolder(Path("/runs/a\nb"))}),
        ("slurm", {"queue": Queue("gpu\nrm")}),
        ("summit", {"name": "two words"}),
        ("summit", {"name": "-x"}),
        ("summit", {"folder": RunFolder(Path("/home/ann b/runs/r"))}),
    ],
)
def test_values_that_a_batch_system_cannot_take(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(BadInputError, match="must have"):
        render_job(job(SITES[name], **changes))


@pytest.mark.parametrize(
    "changes", [{"environment": {"a b": "1"}}, {"directives": ("--x\nrm -rf /",)}, {"account": "a\nb"}]
)
def test_values_of_the_site_that_cannot_stand_in_a_script(changes: dict[str, Any]) -> None:
    with pytest.raises(BadInputError, match="must have"):
        render_job(job(dataclasses.replace(SITES["slurm"], **changes)))


def directives_of(name: str, mode: str = "train", **changes: Any) -> list[str]:
    text = render_job(job(dataclasses.replace(SITES[name], **changes), mode=mode))
    marks = ("#SBATCH ", "#BSUB ", "unset SLURM_")
    return [
        line.removeprefix("#SBATCH ").removeprefix("#BSUB ")
        for line in text.splitlines()
        if line.startswith(marks)
    ]


UNSET = "unset SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_GPUS_PER_NODE"


@pytest.mark.parametrize(
    ("request_", "added"),
    [
        (ResourceRequest(gpus="none"), set()),
        (ResourceRequest(gpus="gpus-per-node"), {"--gpus-per-node=4", UNSET}),
        (ResourceRequest(memory="none"), {"--gres=gpu:4"}),
        (ResourceRequest(cores="none"), {"--gres=gpu:4", "--ntasks-per-node=1", UNSET}),
        (
            ResourceRequest(cores="cpus-per-task"),
            {"--gres=gpu:4", "--ntasks-per-node=1", "--cpus-per-task=64", UNSET},
        ),
    ],
)
def test_a_script_requests_resources_as_the_site_says(request_: ResourceRequest, added: set[str]) -> None:
    usual = {"--mincpus=64", "--mem=524288M", "--gres=gpu:4"}
    kept = {"--mincpus=64"} if request_.cores == "mincpus" else set()
    kept |= {"--mem=524288M"} if request_.memory == "mem" else set()
    found = set(directives_of("slurm", request=request_))
    assert found == set(directives_of("slurm")) - usual | kept | added


@pytest.mark.parametrize(
    ("directives", "lines"),
    [
        (["--gres=nvme:100"], ["--gres=gpu:4,nvme:100"]),
        (["--gres gpu:a100:4", "--x", "--gres=nvme:1"], ["--gres=gpu:a100:4,nvme:1", "--x"]),
        (["--gres=gpu:4(S:0-1)"], ["--gres=gpu:4(S:0-1)"]),
    ],
)
def test_generic_resources_of_directives_are_merged_with_the_gpus(directives, lines) -> None:
    found = directives_of("slurm", directives=tuple(directives))
    assert [line for line in found if line.startswith(("--gres", "--x"))] == lines


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"directives": ("--gres=gpu:2",)}, "requests 2 GPUs, beside the 4"),
        (
            {"directives": ("--gres=gpu:4",), "request": ResourceRequest(gpus="gpus-per-node")},
            "by --gpus-per",
        ),
        ({"job_options": {"quality": "high"}}, "'quality' is none of slurm's: begin, comment"),
        ({"launch": MEMBERS, "request": ResourceRequest(gpus="none")}, "would share its first GPUs"),
    ],
)
def test_requests_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        directives_of("slurm", **changes)


def test_options_of_jobs_are_those_of_the_batch_system() -> None:
    options = {"qos": "debug", "comment": "two words", "mail_type": "END,FAIL"}
    found = directives_of("slurm", job_options=options)
    assert [line for line in found if line.startswith(("--qos", "--comment", "--mail"))] == [
        *("--qos=debug", "--comment='two words'", "--mail-type=END,FAIL"),
    ]
    of_lsf = directives_of("summit", job_options={"qos": "gold", "begin": "20:00"})
    assert {"-sla gold", "-b 20:00"} <= set(of_lsf)


@pytest.mark.parametrize(("name", "option"), [("slurm", "--requeue"), ("summit", "-r")])
def test_only_jobs_of_runs_may_be_requeued(name: str, option: str) -> None:
    assert option in directives_of(name, requeue=True)
    assert option not in [*directives_of(name), *directives_of(name, PROFILE, requeue=True)]


def test_a_job_whose_next_one_is_queued_leaves_only_when_that_has_started(tmp_path: Path) -> None:
    records = run_script(
        tmp_path, dataclasses.replace(job(SITES["local"]), ahead=True), "touch ../runs/*/job-0003.sh"
    )
    assert (records / "driver").exists()
    assert "job-0003.claim" in (tmp_path / "runs" / "digits-1" / "job-0002.sh").read_text()


NASTY = st.text(st.sampled_from("ab-/ '\"$()`;&|<>*?[]{}#!~\\%=\n\té"), min_size=1, max_size=12)


@given(name=NASTY, account=NASTY, folder=NASTY, run=NASTY)
def test_any_value_is_quoted_or_refused(name: str, account: str, folder: str, run: str) -> None:
    site = dataclasses.replace(SITES["slurm"], account=account, setup=())
    run_folder = RunFolder(Path("/runs", "r" + run.replace("/", "")))
    script = job(site, home=Path(f"/{folder}"), name=name, folder=run_folder)
    try:
        text = render_job(script)
    except BadInputError:
        assert any(bad in value for value in (name, account, folder, run) for bad in "\n\t\\")
        return
    # Up to the shell's own words, shlex reads a line as bash and sbatch do.
    lines = {line.partition("=")[0]: line.partition("=")[2] for line in text.splitlines() if "=" in line}
    assert shlex.split(lines["#SBATCH --job-name"]) == [name]
    assert shlex.split(lines["#SBATCH --account"]) == [account]
    log = str(script.files.log).replace("%", "%%")
    assert shlex.split(lines["#SBATCH --output"]) == [log]
    assert shlex.split(lines["export HETCTL_HOME"]) == [str(script.home)]
    assert shlex.split(lines["run"]) == [run_folder.name]
    assert [line for line in text.splitlines() if line.startswith("#SBATCH")] == text.splitlines()[1:15]


def test_bash_reads_nasty_values_as_they_are(tmp_path: Path) -> None:
    nasty = 'it\'s $(touch pwned) `touch pwned` "x" -n \\ ; é'
    site = dataclasses.replace(SITES["local"], environment={"NASTY": nasty})
    folder = tmp_path / nasty.replace("/", "_")
    result = run_script(folder, job(site, folder=RunFolder(Path(f"-{nasty}"))), 'printf "%s" "$NASTY" >nasty')
    assert (result / "nasty").read_text() == nasty
    assert (result / "advance").read_text().splitlines() == ["--after-job", "2", "--", f"-{nasty}"]
    assert sorted(p.name for p in result.iterdir()) == ["advance", "advance-ignores", "driver", "nasty"]


def test_a_job_queued_behind_another_asks_whether_that_is_over(tmp_path: Path) -> None:
    asked = "for _ in {1..300}; do [ ! -e advance ] || break; sleep 0.1; done; mv advance asked"
    records = run_script(tmp_path, job(SITES["local"], after="digits-1-1"), asked)
    assert (records / "asked").read_text().split() == ["--", "digits-1"]


def test_variables_of_communication_libraries_are_not_exported(tmp_path: Path) -> None:
    values = {"NCCL_DEBUG": "WARN", "FI_CXI_RDZV_PROTO": "alt_read", "NOTE": "site"}
    site = dataclasses.replace(SITES["local"], environment=values)
    said = 'printf "%s %s %s" "${NCCL_DEBUG-none}" "${FI_CXI_RDZV_PROTO-none}" "$NOTE" >said'
    records = run_script(tmp_path, job(site), said, NCCL_DEBUG="INFO", NOTE="user")
    assert (records / "said").read_text() == "INFO none site"


def test_a_users_variables_of_communication_libraries_stay() -> None:
    values = {"NCCL_DEBUG": "WARN", "FI_CXI_RDZV_PROTO": "alt_read", "NOTE": "site"}
    site = dataclasses.replace(SITES["local"], environment=values)
    found = site.with_overrides({"NCCL_DEBUG": "INFO", "NOTE": "user", "NCCL_ALGO": "Ring"}).environment
    assert found == {"NCCL_DEBUG": "INFO", "FI_CXI_RDZV_PROTO": "alt_read", "NOTE": "site"}


PYTHON = """\
#!/bin/bash
# Stands for the interpreter: records its arguments and plays driver or advance.
cd "$RECORDS"
module=$2
shift 2
if [ "$module" = hetctl.runtime.driver ]; then
    printf '%s\\n' "$@" >driver
    {driver}
    exit $code
fi
shift
printf '%s\\n' "$@" >advance
trap -p USR2 >advance-ignores
exit ${{ADVANCE_CODE:-0}}
"""


def prepare(folder: Path, script: JobScript, driver: str) -> tuple[Path, list[str], dict[str, str]]:
    """Write the script of `script` with all its paths below `folder`, and the fake interpreter."""
    records = folder / "records"
    records.mkdir(parents=True)
    interpreter = folder / "fake python"
    interpreter.write_text(PYTHON.format(driver=driver))
    interpreter.chmod(0o700)
    run = RunFolder(folder / "runs" / script.folder.name).create()
    script = dataclasses.replace(script, python=str(interpreter), folder=run, home=folder)
    script.files.script.write_text(render_job(script))
    return records, list(submit_command(script)), {**os.environ, "RECORDS": str(records), "code": "0"}


def run_script(folder: Path, script: JobScript, driver: str, **environment: str) -> Path:
    records, command, environ = prepare(folder, script, driver)
    subprocess.run(command, env={**environ, **environment}, check=True, timeout=60)
    return records


@pytest.fixture
def local_job() -> JobScript:
    return job(SITES["local"])


def test_the_driver_is_told_where_it_is(tmp_path: Path, local_job: JobScript) -> None:
    before = int(time.time())
    records = run_script(tmp_path, local_job, "true")
    *words, deadline, option, batch_id = (records / "driver").read_text().splitlines()
    assert words == [str(tmp_path / "runs" / "digits-1"), "--job", "2", "--deadline"]
    assert before <= int(deadline) - (local_job.wall_s - local_job.grace_s) <= time.time()
    assert (option, batch_id) == ("--batch-id", local_job.name)


@pytest.mark.parametrize("mode", [PROFILE, PROBE])
def test_a_job_that_measures_submits_no_other(tmp_path: Path, local_job: JobScript, mode: str) -> None:
    measuring = dataclasses.replace(local_job, mode=mode)
    records = run_script(tmp_path, measuring, "trap -p USR2 >driver-ignores")
    assert (records / "driver").read_text().split() == [str(tmp_path / "runs" / "digits-1"), "--mode", mode]
    assert (records / "driver-ignores").read_text() == "trap -- '' SIGUSR2\n"
    assert not (records / "advance").exists()


@pytest.mark.parametrize("name", ["slurm", "summit"])
def test_a_job_without_grace_is_not_warned(name: str) -> None:
    directives, _, body = render_job(job(SITES[name], mode=PROFILE, grace_s=0)).partition("# Written")
    assert ("USR2" in directives, "--mode profile" in body) == (False, True)


def test_the_drivers_exit_code_is_the_scripts(tmp_path: Path, local_job: JobScript) -> None:
    records, command, environment = prepare(tmp_path, local_job, "code=5")
    assert subprocess.run(command, env=environment, timeout=60).returncode == 5
    assert (records / "advance").exists()


def test_a_failing_advance_is_logged_and_hides_nothing(tmp_path: Path, local_job: JobScript) -> None:
    _, command, environment = prepare(tmp_path, local_job, "code=5; echo from the driver")
    environment["ADVANCE_CODE"] = "4"
    assert subprocess.run(command, env=environment, timeout=60).returncode == 5
    log = tmp_path / "runs" / "digits-1" / "job-0002.log"
    assert log.read_text().splitlines() == [
        "from the driver",
        "hetctl advance failed with exit code 4; go on with: hetctl advance digits-1",
    ]
    assert log.stat().st_mode & 0o777 == 0o600


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def test_a_driver_that_does_not_listen_yet_survives_the_signal(tmp_path: Path, local_job: JobScript) -> None:
    records, command, environment = prepare(tmp_path, local_job, "touch up; sleep 0.5; code=3")
    process = subprocess.Popen(command, env=environment)
    wait_for(records / "up")
    process.send_signal(signal.SIGUSR2)
    assert process.wait(timeout=60) == 3


def test_a_job_that_advance_starts_can_be_signalled(tmp_path: Path, local_job: JobScript) -> None:
    records = run_script(tmp_path, local_job, "trap -p USR2 >driver-ignores")
    assert (records / "driver-ignores").read_text() == "trap -- '' SIGUSR2\n"
    assert (records / "advance-ignores").read_text() == ""


def test_a_projects_template_comes_first_and_extends_hetctls(tmp_path: Path) -> None:
    mine = '{% extends "slurm.sh.j2" %}{% block environment %}ulimit -c 0\n{% endblock %}'
    (tmp_path / "mine.sh.j2").write_text(mine)
    text = render_job(job(dataclasses.replace(SITES["slurm"], template="mine.sh.j2")), [tmp_path])
    assert "\nulimit -c 0\n" in text
    assert "#SBATCH --nodes=2\n" in text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ nothing }}", "'nothing' is undefined"),
        ("{% if %}", "Expected an expression"),
        ("{{ site.__class__.__mro__ }}", "unsafe"),
        ("{% extends 'gone.j2' %}", "'gone.j2'"),
        ("{% extends 'base.sh.j2' %}", "Required block 'batch_id'"),
    ],
)
def test_a_wrong_template_is_bad_input(tmp_path: Path, template: str, message: str) -> None:
    (tmp_path / "slurm.sh.j2").write_text(template)
    with pytest.raises(BadInputError, match=message):
        render_job(job(SITES["slurm"]), [tmp_path])
