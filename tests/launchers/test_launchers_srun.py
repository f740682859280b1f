from __future__ import annotations

import pytest

from hetctl.core.site import Node, Queue, Site
from hetctl.launchers import LAUNCHERS, Step

COMMAND = ("python", "-m", "hetctl.runtime.agent", "driver.json")
GIB = 2**30


def site(**changes: object) -> Site:
    values = {
        "name": "s",
        "batch_system": "slurm",
        "launcher": "srun",
        "nodes": 4,
        "gpus_per_node": 4,
        "cores_per_node": 8,
        "memory_per_node": 8 * GIB,
        "queues": (Queue("main"),),
    }
    return Site(**{**values, **changes})  # type: ignore[arg-type]


def step(site: Site, *names: str) -> Step:
    gpus = tuple(range(site.gpus_per_node))
    return LAUNCHERS[site.launcher](site, [Node(name, gpus) for name in names], COMMAND)


def test_one_step_holds_all_of_every_node_and_outlives_a_lost_one() -> None:
    assert step(site(), "n1", "n2").argv == (
        *("srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"),
        *("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n1,n2", "--cpus-per-task=8"),
        *("--gpus-per-node=4", "--gpu-bind=none", "--mem=0", "--unbuffered"),
        *COMMAND,
    )


def test_the_sites_mpi_plugin_is_named() -> None:
    assert "--mpi=pmix" in step(site(mpi="pmix"), "n1").argv


def test_slots_ask_for_no_gpus() -> None:
    assert not any("gpu" in word for word in step(site(device="slot"), "n1").argv)


def test_the_sites_variables_reach_the_step() -> None:
    found = step(site(environment={"NCCL_DEBUG": "WARN"}), "n1")
    assert found.environment == {"PYTHONUNBUFFERED": "1", "NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_ends_with_the_command_and_keeps_output_flowing(launcher: str) -> None:
    found = step(site(launcher=launcher), "n1")
    assert found.name == "agents"
    assert found.argv[-len(COMMAND) :] == COMMAND
    assert found.environment["PYTHONUNBUFFERED"] == "1"
