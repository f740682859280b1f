from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hetctl.cluster.launchers.nodes import node_of_agent, nodes_command, parse_gpus, parse_nodes
from hetctl.model.errors import BatchSystemError
from hetctl.model.site import Queue, Site


def site(batch_system: str, launcher: str) -> Site:
    return Site("s", batch_system, launcher, 4, 2, 4, 2**30, (Queue("q"),))


SLURM, SUMMIT, LSF, LOCAL = (
    site("slurm", "srun"),
    site("lsf", "jsrun"),
    site("lsf", "mpirun"),
    site("local", "local"),
)


def test_slurm_expands_its_node_list() -> None:
    assert nodes_command(SLURM) == ("sh", "-c", 'exec scontrol show hostnames "$SLURM_JOB_NODELIST"')
    assert parse_nodes(SLURM, {"SLURM_JOB_NODELIST": "n[1-2]"}, "n1\nn2\n") == ("n1", "n2")


def test_lsf_lists_a_line_per_core_after_the_launch_node(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts with a space"
    hosts.write_text("batch2\n" + "a01n02\n" * 42 + "a01n01\n" * 42)
    environment = {"LSB_DJOB_HOSTFILE": str(hosts)}
    command = nodes_command(SUMMIT)
    assert command is not None
    output = subprocess.check_output(command, env={**os.environ, **environment}, text=True)
    assert parse_nodes(SUMMIT, environment, output) == ("a01n02", "a01n01")


@pytest.mark.parametrize(("where", "nodes"), [(SUMMIT, ("n2",)), (LSF, ("n1", "n2"))])
def test_only_jsrun_leaves_the_first_node_to_the_script(where: Site, nodes: tuple[str, ...]) -> None:
    assert parse_nodes(where, {"LSB_DJOB_HOSTFILE": "/f"}, "n1\nn2\nn2\n") == nodes


def test_local_needs_no_command() -> None:
    assert nodes_command(LOCAL) is None
    assert parse_nodes(LOCAL, {}, "") == ("localhost",)


@pytest.mark.parametrize(
    ("where", "environment", "output"),
    [
        (SLURM, {}, "n1\n"),
        (SLURM, {"SLURM_JOB_NODELIST": "n1"}, ""),
        (SUMMIT, {"LSB_DJOB_HOSTFILE": "/f"}, "batch2\n"),
        (LSF, {"LSB_DJOB_HOSTFILE": "/f"}, ""),
    ],
)
def test_outside_a_job_its_nodes_are_refused(where: Site, environment: dict[str, str], output: str) -> None:
    with pytest.raises(BatchSystemError, match="names no nodes"):
        parse_nodes(where, environment, output)


def test_only_a_local_job_has_a_part_of_a_node():
    given = {"HETCTL_GIVEN_GPUS": "1,3"}
    assert parse_gpus(LOCAL, given) == (1, 3)
    assert parse_gpus(LOCAL, {}) == (0, 1)
    assert parse_gpus(SLURM, given) == (0, 1)


AGENT_NODES = {
    "the launcher's own variable": ({"HETCTL_NODE": "n2", "SLURMD_NODENAME": "n1"}, "n1", "n2"),
    "Slurm's": ({"SLURMD_NODENAME": "n2"}, "shared", "n2"),
    "PMIx' one": ({"PMIX_HOSTNAME": "n1.site"}, "shared", "n1"),
    "its host": ({}, "n2", "n2"),
    "its host with a domain": ({}, "n2.cluster.site", "n2"),
    "none of the job's": ({"SLURMD_NODENAME": "n7"}, "n8", None),
}


@pytest.mark.parametrize(("environ", "host", "node"), AGENT_NODES.values(), ids=AGENT_NODES)
def test_the_node_of_an_agent(environ, host, node):
    assert node_of_agent(("n1", "n2"), environ, host) == node
