from __future__ import annotations

import pytest

from hetctl.cluster.launchers import LAUNCHERS, LaunchSpec, ResourceSet
from hetctl.cluster.launchers.srun import hostlist
from hetctl.model.site import Queue, ResourceRequest, Site

COMMAND = ("python", "-m", "hetctl.runtime.agent", "driver.json")
LEADER = ("python", "-m", "hetctl.runtime.data.node_exchange", "lineups.jsonl")
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


def step(site: Site, *names: str) -> LaunchSpec:
    gpus = tuple(range(site.gpus_per_node))
    return LAUNCHERS[site.launcher].agents(
        site, "agents", [ResourceSet(name, gpus) for name in names], COMMAND
    )


def test_one_step_holds_all_nodes_and_survives_a_lost_one() -> None:
    assert step(site(), "n1", "n2").argv == (
        *("srun", "--job-name=agents", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"),
        *("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n[1-2]", "--cpus-per-task=8"),
        *("--gpus-per-node=4", "--gpu-bind=none", "--mem=0", "--unbuffered"),
        *COMMAND,
    )


def test_a_member_has_its_share_of_each_node_and_no_more() -> None:
    """Without --exact and --mem a step would take all cores and memory, and no other would run beside it."""
    sets = [ResourceSet("n1", (1, 3)), ResourceSet("n2", (0, 1))]
    found = LAUNCHERS["srun"].agents(site(launch="members"), "round-0000/m", sets, COMMAND)
    assert found.name == "round-0000/m"
    assert found.argv == (
        *("srun", "--job-name=round-0000/m", "--exact", "--kill-on-bad-exit=1"),
        *("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n[1-2]", "--cpus-per-task=4"),
        *("--gpus-per-node=2", "--gpu-bind=none", "--mem=4096", "--unbuffered"),
        *COMMAND,
    )


def test_the_shares_of_all_members_are_no_more_than_the_node() -> None:
    uneven = site(launch="members", cores_per_node=11, memory_per_node=7 * GIB + 1)
    steps = [LAUNCHERS["srun"].agents(uneven, "m", [ResourceSet("n1", (gpu,))], COMMAND) for gpu in range(4)]
    for flag, most in (("--cpus-per-task=", 11), ("--mem=", 7 * 1024)):
        shares = [int(word.removeprefix(flag)) for each in steps for word in each.argv if flag in word]
        assert (len(shares), sum(shares) <= most) == (4, True)


def test_the_sites_mpi_plugin_is_named() -> None:
    assert "--mpi=pmix" in step(site(mpi="pmix"), "n1").argv


def test_slots_ask_for_no_gpus() -> None:
    assert not any("gpu" in word for word in step(site(device="slot"), "n1").argv)


def test_steps_leave_out_what_a_machine_does_not_take() -> None:
    bare = site(request=ResourceRequest("none", "none", "none"))
    leaders = LAUNCHERS["srun"].leaders(bare, "leaders", ["n1"], LEADER)
    for found in (step(bare, "n1"), leaders):
        assert not any(word.startswith(("--gpu", "--mem", "--gres")) for word in found.argv)
        assert "--cpus-per-task=8" in found.argv


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ("n1", "n1"),
        ("n3 n1 n2 n7", "n[1-3,7]"),
        ("frontier09999 frontier10000 frontier00007", "frontier[00007,09999-10000]"),
        ("n9 n10 n11", "n9,n[10-11]"),
        ("x1000c0s0b0n0 x1000c0s0b0n1 login", "login,x1000c0s0b0n[0-1]"),
        ("17 node-1.site", "17,node-1.site"),
    ],
)
def test_nodes_in_slurms_notation(nodes: str, text: str) -> None:
    assert hostlist(nodes.split()) == text


def test_all_nodes_of_frontier_fit_an_argument() -> None:
    names = [f"frontier{number:05d}" for number in range(1, 9473)]
    assert hostlist(names) == "frontier[00001-09472]"
    assert len(hostlist(names[::2])) < 128 * 1024


def test_the_sites_variables_reach_the_step() -> None:
    found = step(site(environment={"NCCL_DEBUG": "WARN"}), "n1")
    assert found.environment == {"PYTHONUNBUFFERED": "1", "NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_ends_with_the_command_unbuffered(launcher: str) -> None:
    found = step(site(launcher=launcher), "n1")
    assert found.name == "agents"
    assert found.argv[-len(COMMAND) :] == COMMAND
    assert found.environment["PYTHONUNBUFFERED"] == "1"


def test_srun_starts_leaders_although_agents_hold_all_of_a_node() -> None:
    start = LAUNCHERS["srun"].leaders
    assert start is not None
    found = start(site(mpi="pmix"), "exchange", ("n2", "n1"), LEADER)
    assert found.argv == (
        *("srun", "--overlap", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8"),
        *("--gres=none", "--nodelist=n[1-2]", "--kill-on-bad-exit=1", "--unbuffered", "--mpi=pmix"),
        *LEADER,
    )


@pytest.mark.parametrize(("cores", "gpus", "requested"), [(30, 4, 28), (36, 8, 32), (8, 4, 8)])
def test_steps_request_the_cores_of_the_job_and_no_more(cores: int, gpus: int, requested: int) -> None:
    """Slurm refuses a step with more; a job reserves the same number for each GPU."""
    uneven = site(cores_per_node=cores, gpus_per_node=gpus)
    leaders = LAUNCHERS["srun"].leaders(uneven, "leaders", ["n1"], LEADER)
    for found in (step(uneven, "n1"), leaders):
        assert f"--cpus-per-task={requested}" in found.argv
    assert uneven.requested_cores == requested
