"""A Slurm that takes no `--gres`, `--gpus` and `--mem`, and no submission from its compute nodes.

Its agents start from an archive that `sbcast` brings to the nodes.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from itertools import pairwise

import pytest
from one_driver import problems
from workbench import new_project, python_without_training, wait_for

from hetctl.catalog.catalog import Catalog
from hetctl.storage.progress_fold import events_in

pytestmark = pytest.mark.slurm

RUN, MEMBERS, EPOCHS = "pair-001", "ab", 12
ENSEMBLE = f"""\
name: pair
framework: tensorflow
functions: {{input_fn: nets:input_fn, model_fn: nets:model_fn}}
stop: {{metric: val_accuracy, mode: max, patience: 50, max_epochs: {EPOCHS}}}
members:
""" + "".join(
    f"  - {{name: {name}, max_gpus: 2,"
    f" config: {{epochs: {EPOCHS}, epoch_s: 0.2, held_after: 2, until: GATE}}}}\n"
    for name in MEMBERS
)
SITE = """\
python: {python}
request: {{gpus: none, memory: none, cores: none}}
directives: [--exclusive]
timeouts: {{lease: 30s}}
stage: environment.tar
stage_folder: {nodes}
"""
QUEUES = """\
extends: lab
queues: [{name: main, max_nodes: 4, max_wall: 1h}, {name: urgent, max_nodes: 4, max_wall: 1h}]
queue: [main, urgent]
"""
SBATCH = """\
if [ -n "$SLURM_JOB_ID" ]; then
    echo "$@" >>{refused}
    echo "sbatch: error: Batch job submission failed: Access/permission denied" >&2
    exit 1
fi
for word in "$@"; do [ -f "$word" ] && lines=$(grep '^#SBATCH' "$word"); done
"""
REFUSING = """\
if grep -qE -e '--(gres|gpus|mem)' <<<"$* $lines"; then
    echo "$* $lines" >>{refused}
    echo "{name}: error: --gres, --gpus and --mem are not accepted" >&2
    exit 1
fi
exec {real} "$@"
"""


def test_a_chain_of_five_is_queued_from_the_login_node_without_gres_and_mem(slurm_cluster, tmp_path):
    refused, shims, gate = tmp_path / "refused", tmp_path / "bin", tmp_path / "gate"
    shims.mkdir()
    for name, before in {"sbatch": SBATCH, "srun": ""}.items():
        text = (before + REFUSING).format(refused=refused, name=name, real=shutil.which(name))
        (shims / name).write_text(f"#!/bin/bash\n{text}")
        (shims / name).chmod(0o755)
    (shims / "scrontab").touch(mode=0o755)
    python, nodes = python_without_training(tmp_path), tmp_path / "nodes"
    nodes.mkdir()
    lab = slurm_cluster.lab(tmp_path / "project", SITE.format(python=python, nodes=nodes))
    (tmp_path / "project/site-configs/two.yaml").write_text(QUEUES)
    lab["HETCTL_SITE"] = "two"
    path = {"PATH": f"{shims}:{os.environ['PATH']}"}
    ensemble = ENSEMBLE.replace("GATE", str(gate))
    project = new_project(tmp_path / "project", ensemble, environment=lab | path)
    with tarfile.open(project.path / "environment.tar", "w") as archive:
        archive.add(python, "bin/python")
    ask = project.here("submit", "--dry-run", "--gpus", "4", "--time", "10m", "--job-option", "comment=hi")
    assert "#SBATCH --comment=hi\n" in ask.stdout
    checked = project.here("doctor", "--json").json["checks"]
    assert {check["status"] for check in checked if check["name"] == "dry run"} == {"ok"}
    assert project.here("profile", "--gpus", "2", "--json").json["points"]
    # A queue that starts no jobs is not chosen.
    slurm_cluster.run("scontrol", "update", "partitionname=main", "state=inactive")
    try:
        submitted = project.here("submit", "--gpus", "4", "--time", "10m", "--chain", "5")
    finally:
        slurm_cluster.run("scontrol", "update", "partitionname=main", "state=up")
    assert submitted.code == 0, submitted
    assert f"*/30 * * * * cd {project.path} && hetctl advance {RUN}" in submitted.stdout
    assert "submitted to urgent, of which the earliest start is expected" in submitted.stdout

    def jobs():
        with Catalog.open(project.home.catalog) as catalog:
            return catalog.jobs(RUN)

    ids = [job.batch_id for job in jobs()]
    assert len(ids) == 5
    for before, after in pairwise(ids):
        shown = slurm_cluster.run("scontrol", "show", "job", after)
        assert f"Dependency=afterany:{before}" in shown
    # The first job is told to end, and the second one trains what it finds left.
    wait_for(lambda: project.epochs(RUN).keys() == set(MEMBERS), seconds=120)
    slurm_cluster.run("scancel", "--batch", "--signal=TERM", ids[0])
    gate.touch()
    wait_for(project.is_over, seconds=120)
    assert project.epochs(RUN) == {name: list(range(1, EPOCHS + 1)) for name in MEMBERS}
    assert problems(events_in(project.home.run(RUN)), epochs=dict.fromkeys(MEMBERS, EPOCHS)) == []
    wait_for(lambda: all(job["state"] not in ("running", "pending") for job in states(project)), seconds=60)
    assert [job["state"] for job in states(project)] == ["finished"] * 2 + ["cancelled"] * 3
    assert not refused.exists(), refused.read_text()
    first = project.home.run(RUN).job(0)
    assert "environment: sbcast brought it" in first.log.read_text()
    assert f"{nodes}/hetctl-" in first.agents.log.read_text()
    assert not list(nodes.glob("*/*/")), "the last agent leaves nothing behind"


def states(project):
    return project.here("status", "--json").json["jobs"]
