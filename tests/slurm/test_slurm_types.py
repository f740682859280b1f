"""Two types of GPU on a real Slurm: each is profiled for itself, and a group trains on both as planned."""

from __future__ import annotations

import json
import shutil

import pytest
from tiny_networks import ENSEMBLES
from workbench import new_project, python_without_training, wait_for

from hetctl.methods.balance.observation_log import ManagerStart, records_in
from hetctl.scheduling.planners.base import options_from
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import read_spec

pytestmark = pytest.mark.slurm
TYPES = {"fast": ("n1", "n3"), "slow": ("n2", "n4")}
SECONDS = {"fast": 0.01, "slow": 0.02}
"""Per sample."""
SITE = """\
extends: slurm
nodes: {all}
gpus_per_node: 2
cores_per_node: 2
memory_per_node: 24000MiB
node_types:
  - {{gpu_type: fast, nodes: {each}, hosts: {fast}}}
  - {{gpu_type: slow, nodes: {each}, hosts: {slow}}}
queues:
  - {{name: main, max_nodes: {all}, max_wall: 1h}}
  - {{name: fast, max_nodes: {each}, max_wall: 1h}}
  - {{name: slow, max_nodes: {each}, max_wall: 1h}}
queue: main
environment: {environment}
"""
# Planned for 200 epochs, so that start-up times do not decide; the first one meets the target.
ENSEMBLE = """\
name: types
framework: pytorch
functions: {input_fn: MODULE:input_fn, model_fn: MODULE:model_fn, train_fn: MODULE:typed_train_fn}
stop: {metric: val_loss, target: 1000, expected_epochs: 200, max_epochs: 200}
members:
"""
MEMBER = "  - {{name: m, batch_size: 16, max_gpus: 4, config: {config}}}\n"


@pytest.fixture
def cluster(slurm_cluster):
    """The cluster, with a partition for each type of its nodes."""
    for name, nodes in TYPES.items():
        slurm_cluster.run("scontrol", "create", f"partitionname={name}", f"nodes={','.join(nodes)}")
    yield slurm_cluster
    for name in TYPES:
        # The last job may still be completing.
        wait_for(lambda name=name: not slurm_cluster.run("squeue", "--noheader", f"--partition={name}"))
        slurm_cluster.run("scontrol", "delete", f"partitionname={name}")


def project_of(folder, cluster, config, module="tiny_torch", each=2, **fields):
    """Make a project with one member, on so many nodes of each type."""
    text = ENSEMBLE.replace("MODULE", module) + MEMBER.format(config=json.dumps(config))
    environment = {**cluster.environment(), "HETCTL_SITE": "lab"}
    project = new_project(folder / "project", text, environment=environment, **fields)
    for module in ("tiny_torch", "handwriting"):
        shutil.copy(ENSEMBLES / f"{module}.py", project.path)
    (project.path / "site-configs").mkdir()
    mpi = {name: value for name, value in cluster.environment().items() if name.startswith("OMPI")}
    hosts = {name: list(nodes[:each]) for name, nodes in TYPES.items()}
    site = SITE.format(environment=json.dumps(mpi), all=2 * each, each=each, **hosts)
    (project.path / "site-configs" / "lab.yaml").write_text(site)
    return project


def rates(answer):
    """The type and the number of GPUs of each point."""
    return sorted((point["machine"]["gpu_type"], point["gpus"]) for point in answer.json["points"])


def test_a_job_measures_on_one_type_of_gpu(tmp_path, cluster):
    python = python_without_training(tmp_path)
    project = project_of(tmp_path, cluster, {}, module="nets", python=python)
    with (project.path / "nets.py").open("a") as nets:
        nets.write("def typed_train_fn(data, model, optimizer, config): ...\n")
    # Slurm gives the job n1 and n2, of different types.
    first = project.here("profile", "--all", "--json")
    assert first.code == 5
    assert rates(first) == [("fast", 1), ("fast", 2)]
    assert [(one["point"]["gpus"], one["error"]) for one in first.json["failures"]] == [
        (gpus, f"the job has no {gpus} GPUs of one type") for gpus in (3, 4)
    ]
    second = project.here("profile", "--all", "--queue", "slow", "--force", "--json")
    assert second.code == 0, second
    assert rates(second) == [("fast", 1), ("fast", 2), *(("slow", gpus) for gpus in (1, 2, 3, 4))]


@pytest.mark.training
def test_a_group_on_both_types_trains_with_the_planned_batches(tmp_path, cluster):
    config = {"seconds": {node: SECONDS[name] for name, nodes in TYPES.items() for node in nodes}}
    project = project_of(tmp_path, cluster, config, each=1)
    rows = (f"m,{gpus},{gpus / SECONDS[name]},{name},{200 * 640}\n" for name in TYPES for gpus in (1, 2))
    (project.path / "rates.csv").write_text("member,gpus,rate,gpu_type,samples\n" + "".join(rows))
    assert project.here("profile", "import", "rates.csv").code == 0
    size = ("--gpus", "4", "--time", "10m", "--mode", "auto")
    plan = project.here("plan", *size, "--json").json
    assert [phase["mode"] for phase in plan["phases"]] == ["balanced"]
    assert plan["balance_gains"]["m"] > 1.2
    (planned,) = plan["rounds"][0]["allocations"]
    shown = project.here("plan", *size).stdout
    assert f"gain of balanced batches over equal ones: m {plan['balance_gains']['m']:.2f}\n" in shown
    done = project.here("submit", *size, "--wait", "--json")
    assert (done.code, done.json["state"]) == (0, "finished"), done
    run = project.home.run("types-001")
    assert options_from(read_spec(run).options).mix_types
    events = events_in(run)
    (step,) = [event.data for event in events if event.kind == "task_started"]
    # Slurm gives the job n1 and n2, of different types.
    assert {place["node"] for place in step["placement"]} == {"n1", "n2"}
    (started,) = [event.data["reason"] for event in events if event.kind == "balance_started"]
    assert started == "several types of GPU"
    with (run.balance / "m.jsonl").open() as lines:
        first = next(record for record in records_in(lines) if isinstance(record, ManagerStart))
    sizes = dict(zip(first.workers, first.batches, strict=True))
    fast, slow = ([sizes[f"{node}:{gpu}"] for gpu in (0, 1)] for node in ("n1", "n2"))
    # The plan has the types' nodes in another order.
    assert sorted(first.batches) == sorted(planned["batch_sizes"])
    assert min(fast) > 16 > max(slow)
