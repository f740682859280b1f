"""``launch: members`` on a real Slurm: a step for each member and round, whose ranks see its GPUs alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_driver import problems
from workbench import ProjectFolder, new_project, python_without_training, ranks_of, wait_for

from hetctl.catalog.catalog import Catalog
from hetctl.cluster.launchers.agents import round_prefix
from hetctl.storage.progress_fold import events_in

pytestmark = pytest.mark.slurm

RUN = "lot-001"
GPUS = {"a": 1, "b": 1, "c": 2, "d": 2, "wide": 4}
EPOCHS = {"a": 6, "b": 6, "c": 11, "d": 3, "wide": 3}
ENSEMBLE = """\
name: lot
framework: tensorflow
functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}
stop: {metric: val_accuracy, mode: max, patience: 50, max_epochs: 12}
members:
"""
MEMBER = (
    "  - {{name: {name}, min_gpus: {least}, max_gpus: {gpus}, config: {{epochs: {epochs}, epoch_s: 0.7}}}}\n"
)
OPTIONS = ("--launch", "members", "--gpus", "4", "--time", "10m", "--planner")


def project_of(cluster, folder, gpus: dict[str, int], epochs: dict[str, int]) -> ProjectFolder:
    """Make a project whose members train on so many GPUs, for so many epochs."""
    python = python_without_training(folder)
    members = (
        MEMBER.format(name=name, least=most if name == "wide" else 1, gpus=most, epochs=epochs[name])
        for name, most in gpus.items()
    )
    environment = cluster.lab(folder / "project", f"timeouts: {{lease: 30s}}\npython: {python}\n")
    made = new_project(folder / "project", ENSEMBLE + "".join(members), environment=environment)
    rates = (
        f"{name},{k},{100 * k / most:g},500\n" for name, most in gpus.items() for k in (1, 2, 4) if k <= most
    )
    (made.path / "rates.csv").write_text("member,gpus,rate,samples\n" + "".join(rates))
    assert made.here("profile", "import", "rates.csv").code == 0
    return made


def test_each_member_has_a_step_whose_ranks_see_its_gpus_only(slurm_cluster, tmp_path):
    """That of one is on both nodes."""
    project = project_of(slurm_cluster, tmp_path, GPUS, EPOCHS)
    shown = project.here("submit", "--dry-run", *OPTIONS, "flotilla")
    assert shown.stderr.count("srun --job-name=round-0000/") == 3
    assert shown.stderr.count("# first round, node-") == 2
    assert project.here("submit", *OPTIONS, "flotilla").code == 0
    seen: dict[str, str] = {}
    # Steps that last for a second must not be missed.
    wait_for(lambda: _watch(project, seen) or _state(project) == "finished", seconds=90, rest=3)
    assert {name: epochs[-1] for name, epochs in project.epochs(RUN).items()} == EPOCHS
    started = list(_started(project))
    assert len(started) > len(GPUS)
    assert {nodes for name, nodes in started if name.endswith("/wide")} == {2}
    assert _steps(slurm_cluster, project) == sorted(started)
    assert {"round-0000/a", "round-0000/b", "round-0000/c"} <= seen.keys()
    for name, visible in seen.items():
        assert len(visible.split(",")) == min(GPUS[name.rpartition("/")[2]], 2), name


def test_a_lost_node_ends_the_job_and_the_next_one_goes_on(slurm_cluster, tmp_path):
    """Slurm starts no more steps in a job that has lost a node."""
    project = project_of(slurm_cluster, tmp_path, {"a": 2, "b": 2}, {"a": 9, "b": 9})
    assert project.here("submit", *OPTIONS, "fixed-2").code == 0
    wait_for(lambda: project.epochs(RUN).keys() == {"a", "b"}, seconds=60)
    (first, second) = (e for e in project.driver_events(RUN) if e.kind == "task_started")
    lost = second.data["placement"][0]["node"]
    script = slurm_cluster.run("squeue", "--noheader", "--format=%B").strip()
    lost = lost if lost != script else first.data["placement"][0]["node"]
    slurm_cluster.crash_node(lost)
    try:
        wait_for(project.is_over, seconds=120)
    finally:
        slurm_cluster.boot_node(lost)
    events = project.driver_events(RUN)
    assert [e.data["nodes"] for e in events if e.kind == "node_failed"] == [[lost]]
    assert [e.data["reason"] for e in events if e.kind == "job_ended"] == ["node-failure", "finished"]
    assert problems(events_in(project.home.run(RUN)), epochs={"a": 9, "b": 9}) == []


def _watch(project, seen) -> None:
    """Note what the ranks of each step see; ranks that live at the same time share no GPU."""
    folder = project.home.run(RUN).path
    found = {pid: _variables(pid) for pid in ranks_of(folder)}
    at_once = [found[pid] for pid in ranks_of(folder) if found.get(pid)]
    steps = {(each["SLURMD_NODENAME"], each["SLURM_STEP_ID"]): each for each in at_once}
    held = [
        (node, gpu) for (node, _), each in steps.items() for gpu in each["CUDA_VISIBLE_DEVICES"].split(",")
    ]
    assert len(held) == len(set(held)), steps
    seen |= {each["step"]: each["CUDA_VISIBLE_DEVICES"] for each in at_once}


def _variables(pid: int) -> dict[str, str]:
    """Return the variables of a rank, and the name of its step, of which its agent was told."""
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {
        **dict(line.split("=", 1) for line in lines if "=" in line),
        "step": words[words.index("--step") + 1],
    }


def _state(project) -> str:
    return project.here("status", "--json").json["state"]


def _started(project):
    """Members by round, as their steps are called, and on how many nodes each was placed."""
    for event in project.driver_events(RUN):
        if event.kind == "task_started":
            yield f"{round_prefix(event.round)}/{event.data['member']}", len(event.data["placement"])


def _steps(cluster, project):
    """The steps that Slurm had, by name, and on how many nodes each was."""
    with Catalog.open(project.home.catalog) as catalog:
        jobs = ",".join(job.batch_id for job in catalog.jobs(RUN))
    output = cluster.run("sacct", "-n", "-P", "--format=JobID,JobName%80,NNodes", f"--jobs={jobs}")
    rows = [line.split("|") for line in output.splitlines()]
    return sorted((name, int(nodes)) for job, name, nodes in rows if job.partition(".")[2].isdigit())
