"""The cluster fixture itself: what hetctl's Slurm tests take for granted."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import ClusterError, SlurmCluster, cluster_processes

pytestmark = pytest.mark.slurm

STEP = "srun --exact --cpus-per-task=1 --gpus-per-task=1 --mem=200M --mpi=pmix --kill-on-bad-exit=1"
SHOW_GPUS = (
    """'echo "$SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $(date +%s.%N)";"""
    " for i in {{1..600}}; do [ -s {a} ] && [ -s {b} ] && break; sleep 0.05; done; date +%s.%N'"
)
"""Program of a step that shows its GPUs, and waits up to 30 s for the output of both steps."""
SHOW_RANK = (
    "from mpi4py.MPI import COMM_WORLD as c; import os;"
    "print(c.rank, c.size, c.allreduce(c.rank), os.environ['SLURMD_NODENAME'])"
)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hetctl-slurm-", dir="/tmp") as name:
        yield Path(name)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def submit(cluster: SlurmCluster, folder: Path, body: str, *options: str) -> str:
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\n{body}\n")
    output = f"--output={folder}/job.log"
    return cluster.run(
        "sbatch", "--parsable", "--no-requeue", "--gres=gpu:2", "--mem=2000M", output, *options, str(script)
    ).strip()


def state(cluster: SlurmCluster, job: str) -> str:
    return cluster.run("sacct", "-X", "-P", "-n", "-j", job, "--format=State").strip()


def finish(cluster: SlurmCluster, job: str) -> str:
    wait_until(lambda: state(cluster, job) not in ("", "PENDING", "RUNNING"))
    return state(cluster, job)


def test_concurrent_steps_see_disjoint_gpus(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    show = SHOW_GPUS.format(a=tmp_path / "a", b=tmp_path / "b")
    steps = "\n".join(
        f"{STEP} -N1 -n1 bash -c {show} >{tmp_path}/{name} &\npids+=($!)" for name in ("a", "b")
    )
    body = f'{steps}\nfor pid in "${{pids[@]}}"; do wait "$pid" || exit; done'
    job = submit(slurm_cluster, tmp_path, body, "--nodes=1", "--exclusive")
    assert finish(slurm_cluster, job) == "COMPLETED", (tmp_path / "job.log").read_text()
    first, second = ((tmp_path / name).read_text().split() for name in ("a", "b"))
    assert first[0] == second[0]
    assert {first[1], second[1]} == {"0", "1"}
    assert max(float(first[2]), float(second[2])) < min(float(first[3]), float(second[3])), (
        "one after another"
    )


def test_accounting_tells_how_a_job_ended(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(slurm_cluster, tmp_path, "exit 3", "--nodes=1")
    assert finish(slurm_cluster, job) == "FAILED"
    assert slurm_cluster.run("sacct", "-X", "-P", "-n", "-j", job, "--format=ExitCode").strip() == "3:0"


def test_mpi_spans_named_nodes_unevenly(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    body = f'{STEP} -n3 --distribution=arbitrary -w n1,n1,n2 {sys.executable} -c "{SHOW_RANK}"'
    job = submit(slurm_cluster, tmp_path, body, "--nodelist=n1,n2", "--nodes=2", "--exclusive")
    ended = finish(slurm_cluster, job)
    log = (tmp_path / "job.log").read_text()
    assert ended == "COMPLETED", log
    assert sorted(log.splitlines()) == ["0 3 3 n1", "1 3 3 n1", "2 3 3 n2"]


def test_crashed_node_fails_its_job_and_comes_back(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(slurm_cluster, tmp_path, "sleep 100", "--nodelist=n4", "--nodes=1")
    wait_until(lambda: state(slurm_cluster, job) == "RUNNING")
    slurm_cluster.crash_node("n4")
    with pytest.raises(ClusterError, match="not up"):
        slurm_cluster.crash_node("n4")
    assert finish(slurm_cluster, job) == "NODE_FAIL"
    slurm_cluster.boot_node("n4")
    wait_until(slurm_cluster.all_idle)


def test_nothing_outlives_a_killed_owner(short_folder: Path) -> None:
    program = Path(__file__).parents[1] / "slurm_cluster.py"
    owner = subprocess.Popen([sys.executable, program, short_folder], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline().startswith("export SLURM_CONF=")
    assert len(cluster_processes(short_folder)) >= 8
    owner.kill()
    owner.communicate()
    wait_until(lambda: not cluster_processes(short_folder))


def test_folder_of_something_else_is_left_alone(short_folder: Path) -> None:
    (short_folder / "precious").touch()
    with pytest.raises(ClusterError, match="something else"):
        SlurmCluster(short_folder).start()
    assert (short_folder / "precious").exists()
