from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hetctl.core.errors import BatchSystemError
from hetctl.launchers import nodes_command, parse_nodes


def test_slurm_expands_its_node_list() -> None:
    assert nodes_command("slurm") == ("sh", "-c", 'exec scontrol show hostnames "$SLURM_JOB_NODELIST"')
    assert parse_nodes("slurm", {"SLURM_JOB_NODELIST": "n[1-2]"}, "n1\nn2\n") == ("n1", "n2")


def test_lsf_lists_a_line_per_core_after_the_launch_node(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts with a space"
    hosts.write_text("batch2\n" + "a01n02\n" * 42 + "a01n01\n" * 42)
    environment = {"LSB_DJOB_HOSTFILE": str(hosts)}
    command = nodes_command("lsf")
    assert command is not None
    output = subprocess.check_output(command, env={**os.environ, **environment}, text=True)
    assert parse_nodes("lsf", environment, output) == ("a01n02", "a01n01")


def test_local_needs_no_command() -> None:
    assert nodes_command("local") is None
    assert parse_nodes("local", {}, "") == ("localhost",)


@pytest.mark.parametrize(
    ("batch_system", "environment", "output"),
    [
        ("slurm", {}, "n1\n"),
        ("slurm", {"SLURM_JOB_NODELIST": "n1"}, ""),
        ("lsf", {"LSB_DJOB_HOSTFILE": "/f"}, "batch2\n"),
    ],
)
def test_outside_a_job(batch_system: str, environment: dict[str, str], output: str) -> None:
    with pytest.raises(BatchSystemError, match="names no nodes"):
        parse_nodes(batch_system, environment, output)
