"""A rank's own share of what its step was given."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CORES = sorted(os.sched_getaffinity(0))
BIND = """
import json, os, sys
from hetctl.runtime.device import bind_device
cores = bind_device(sys.argv[1], int(sys.argv[2]))
print(json.dumps({"cores": cores, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}))
"""


def bound(device, gpus, **environment):
    """Bind in a process of its own; return its cores and GPUs."""
    done = subprocess.run(
        [sys.executable, "-c", BIND, device, str(gpus)],
        env={**os.environ, **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "variable", ["OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "JSM_NAMESPACE_LOCAL_RANK"]
)
def test_each_rank_of_a_step_on_gpus_sees_one_of_them(variable):
    visible = {"CUDA_VISIBLE_DEVICES": "2,5"}
    seen = [bound("gpu", 2, **visible, **{variable: str(rank)})["gpus"] for rank in (0, 1)]
    assert seen == ["2", "5"]


def test_one_gpu_that_the_launcher_chose_is_left_alone():
    assert bound("gpu", 2, CUDA_VISIBLE_DEVICES="3", SLURM_LOCALID="1")["gpus"] == "3"


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_ranks_share_the_cores_of_their_slots():
    shares = [
        bound("slot", 2, HETCTL_CORES="0,1", OMPI_COMM_WORLD_LOCAL_RANK=str(rank))["cores"] for rank in (0, 1)
    ]
    assert shares == [[CORES[0]], [CORES[1]]]
    assert bound("slot", 1, HETCTL_CORES="0,1")["cores"] == CORES[:2]


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_cores_are_shared_by_the_ranks_of_the_node_alone():
    here = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert bound("slot", 2, HETCTL_CORES="0,1", **here)["cores"] == CORES[:2]


def test_more_slots_than_cores_go_round():
    assert bound("slot", 1, HETCTL_CORES=str(len(CORES)))["cores"] == [CORES[0]]


def test_without_slots_all_cores_are_left():
    assert bound("slot", 1)["cores"] == CORES
