from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.core.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.core.site import Queue, Site
from hetctl.launchers import LAUNCHERS, Step

COMMAND = ("python", "-m", "hetctl.runtime.rank", "crew.json")
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


def step(site: Site, *counts: int) -> Step:
    placement = tuple(Placement(f"n{i}", tuple(range(k))) for i, k in enumerate(counts, start=1))
    return LAUNCHERS["srun"](site, Allocation("m", sum(counts), DATA_PARALLEL, 1.0, placement), COMMAND)


def test_one_gpu() -> None:
    found = step(site(mpi="pmix"), 1)
    assert found.argv == (
        *("srun", "--exact", "--nodes=1", "--ntasks=1", "--cpus-per-task=2", "--gpus-per-task=1"),
        *("--ntasks-per-node=1", "--mem=2048M", "--nodelist=n1", "--kill-on-bad-exit=1", "--unbuffered"),
        *COMMAND,
    )
    assert found.file is None


def test_whole_nodes_share_the_ranks_evenly_over_mpi() -> None:
    found = step(site(mpi="pmix"), 4, 4)
    assert found.argv == (
        *("srun", "--exact", "--nodes=2", "--ntasks=8", "--cpus-per-task=2", "--gpus-per-task=1"),
        *("--ntasks-per-node=4", "--mem=8192M", "--nodelist=n1,n2", "--kill-on-bad-exit=1", "--unbuffered"),
        *("--mpi=pmix", *COMMAND),
    )


def test_uneven_nodes_take_memory_per_core_and_name_a_node_per_rank() -> None:
    found = step(site(), 4, 2)
    assert found.argv[:9] == (
        *("srun", "--exact", "--nodes=2", "--ntasks=6", "--cpus-per-task=2", "--gpus-per-task=1"),
        *("--distribution=arbitrary", "--mem-per-cpu=1024M", "--kill-on-bad-exit=1"),
    )
    assert found.file == ("n1", "n1", "n1", "n1", "n2", "n2")


def test_slots_ask_for_no_gpus() -> None:
    assert not any("gpu" in word for word in step(site(device="slot"), 2).argv)


def test_the_sites_variables_reach_the_step() -> None:
    found = step(site(environment={"NCCL_DEBUG": "WARN"}), 1)
    assert found.environment == {"PYTHONUNBUFFERED": "1", "NCCL_DEBUG": "WARN"}


def flag(found: Step, name: str) -> int | None:
    values = [word.split("=")[1].rstrip("M") for word in found.argv if word.startswith(f"{name}=")]
    return int(values[0]) if values else None


@given(
    st.integers(1, 8), st.integers(0, 31), st.integers(2**20, 2**40), st.lists(st.integers(1, 8), min_size=1)
)
def test_no_node_is_asked_for_more_than_it_has(gpus: int, spare: int, memory: int, counts: list[int]) -> None:
    machine = site(gpus_per_node=gpus, cores_per_node=gpus + spare, memory_per_node=memory)
    counts = [min(count, gpus) for count in counts]
    found = step(machine, *counts)
    cores = flag(found, "--cpus-per-task") or 0
    for count in counts:
        share = flag(found, "--mem") or count * cores * (flag(found, "--mem-per-cpu") or 0)
        assert share * 2**20 <= memory * count // gpus
        assert count * cores <= machine.cores_per_node
    assert "--overlap" not in found.argv
    assert flag(found, "--ntasks") == sum(counts)
    assert found.file is None or len(found.file) == sum(counts)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_ends_with_the_command_and_keeps_output_flowing(launcher: str) -> None:
    allocation = Allocation("m", 2, DATA_PARALLEL, 1.0, (Placement("n1", (0, 1)),))
    found = LAUNCHERS[launcher](site(launcher=launcher), allocation, COMMAND)
    assert found.member == "m"
    assert found.argv[-len(COMMAND) :] == COMMAND
    assert found.environment["PYTHONUNBUFFERED"] == "1"
