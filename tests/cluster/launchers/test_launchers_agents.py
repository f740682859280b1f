"""Resource sets, the steps that start their agents, and the packing of a round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetctl.cluster.launchers import ResourceSet
from hetctl.cluster.launchers.agents import (
    agent_arguments,
    agents_step,
    cancel_command,
    gpus_of,
    hop_lines,
    packing_lines,
    sets_by_step,
)
from hetctl.model.errors import InfeasibleError
from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.site import MEMBERS, NODES, Node, Queue, Site

FOLDER = Path("/r/round-0003")
NODES_OF_JOB = (Node("n1", (0, 1, 2, 3)), Node("n2", (0, 1, 2, 3)))


def site(launch: str) -> Site:
    return Site("s", "slurm", "srun", 2, 4, 8, 2**33, (Queue("main"),), launch=launch)


def member(name: str, *places: tuple[str, tuple[int, ...]], gpus: int | None = None) -> Allocation:
    placement = tuple(Placement(node, held) for node, held in places)
    count = sum(len(place.gpus) for place in placement)
    return Allocation(name, gpus or count, DATA_PARALLEL, 1.0, placement)


def placements(*allocations: Allocation) -> dict[str, tuple[Placement, ...]]:
    return {allocation.member: allocation.placement for allocation in allocations}


def test_gpus_are_in_the_order_of_the_ranks() -> None:
    assert gpus_of(member("m", ("n2", (1, 3)), ("n1", (0,))).placement, 4) == (
        ("n2", 1),
        ("n2", 3),
        ("n1", 0),
    )
    assert [gpus_of([Placement("n", (3,), seat)], 4) for seat in (1, 2, 3)] == [
        *((("n", 3),), (("n", 7),), (("n", 11),))
    ]


def test_by_nodes_one_step_serves_all_members() -> None:
    steps = sets_by_step(site(NODES), NODES_OF_JOB, FOLDER.name, placements(member("a", ("n1", (0,)))))
    assert steps == {"agents": (ResourceSet("n1", (0, 1, 2, 3)), ResourceSet("n2", (0, 1, 2, 3)))}


def test_by_members_each_has_a_step_with_its_own_gpus() -> None:
    allocations = [member("a", ("n1", (2, 3)), ("n2", (0, 1))), member("b", ("n1", (0,)))]
    assert sets_by_step(site(MEMBERS), NODES_OF_JOB, FOLDER.name, placements(*allocations)) == {
        "round-0003/a": (ResourceSet("n1", (2, 3)), ResourceSet("n2", (0, 1))),
        "round-0003/b": (ResourceSet("n1", (0,)),),
    }


def test_a_member_has_one_step_per_number_of_gpus_on_a_node() -> None:
    uneven = member("a", ("n1", (0, 1, 2, 3)), ("n2", (0, 1, 2, 3)), ("n3", (1, 2)))
    steps = sets_by_step(site(MEMBERS), NODES_OF_JOB, FOLDER.name, placements(uneven))
    assert steps == {
        "round-0003/a/4": (ResourceSet("n1", (0, 1, 2, 3)), ResourceSet("n2", (0, 1, 2, 3))),
        "round-0003/a/2": (ResourceSet("n3", (1, 2)),),
    }
    commands = [agents_step(site(MEMBERS), n, s, FOLDER, (), "python").argv for n, s in steps.items()]
    assert ["--gpus-per-node=4" in commands[0], "--gpus-per-node=2" in commands[1]] == [True, True]


def test_agents_start_mps_with_a_share_of_the_threads_for_each_process() -> None:
    for most, percent in (("auto", "100"), (1, "100"), (2, "100"), (3, "67"), (16, "13")):
        shared = replace(site(NODES), mps=True, max_per_gpu=most)
        argv = agents_step(shared, "agents", (ResourceSet("n1", (0,)),), FOLDER, (), "python").argv
        assert argv[argv.index("--mps") + 1] == percent


def test_a_job_is_ended_by_its_own_batch_system_alone() -> None:
    both = {"SLURM_JOB_ID": "17", "LSB_JOBID": "18"}
    assert cancel_command(site(NODES), both) == ("scancel", "17")
    assert cancel_command(replace(site(NODES), batch_system="lsf"), both) == ("bkill", "18")
    # A local run within an allocation, which is not its own.
    assert cancel_command(replace(site(NODES), batch_system="local"), both) == ()
    assert cancel_command(site(NODES), {}) == ()


def test_packing_lists_members_by_node_and_marks_spread_ones() -> None:
    allocations = [
        member("a", ("n1", (2, 3)), ("n2", (0,))),
        member("b", ("n1", (0, 1))),
        member("c", ("n3", (0,)), ("n2", (1,))),
    ]
    nodes = (*NODES_OF_JOB, Node("n3", (0,)))
    assert list(packing_lines(allocations, nodes)) == [
        "n1: a on 2, 3 (2 nodes with 2 + 1 GPUs); b on 0, 1",
        "n2: a on 0 (2 nodes with 2 + 1 GPUs); c on 1 (2 nodes x 1 GPUs)",
        "n3: c on 0 (2 nodes x 1 GPUs)",
    ]


def test_hops_are_listed_by_node_with_its_partitions() -> None:
    homes = {"n1": {2, 0}, "n2": {1}, "elsewhere": {3}}
    nodes = (Node("n1", (0, 1)), Node("n2", (4,)))
    assert list(hop_lines(("a", "b", "c"), homes, nodes)) == [
        "n1: 3 members in turn on 0, 1, with the partitions 0, 2",
        "n2: 3 members in turn on 4, with the partitions 1",
    ]


@pytest.mark.parametrize(
    ("allocations", "message"),
    [
        (
            [member("a", ("n1", (0, 1, 2, 3, 4)))],
            "a is placed on GPUs 0, 1, 2, 3, 4 of n1, which has 0, 1, 2",
        ),
        ([member("a", ("n1", (0, 1)), gpus=6)], "a has 6 GPUs, but is placed on 2"),
        ([member("a", ("n1", (0, 0)))], "a has 2 GPUs, but is placed on 1"),
        ([member("a", ("n9", (0,)))], "of n9, which has none left"),
        (
            [member("a", ("n1", (0, 1))), member("b", ("n1", (1,)))],
            "b is placed on GPUs 1 of n1, which has 2, 3",
        ),
    ],
)
def test_a_placement_that_contradicts_its_gpus_is_refused(allocations, message) -> None:
    with pytest.raises(InfeasibleError, match=message):
        list(packing_lines(allocations, NODES_OF_JOB))


def test_an_agents_command_names_step_driver_and_frameworks() -> None:
    frameworks = ("pytorch", "tensorflow")
    command = agent_arguments("agents", Path("/r/job-0000.driver.json"), frameworks, 8)
    assert command == (
        *("-m", "hetctl.runtime.agent", "/r/job-0000.driver.json", "--step", "agents"),
        *("--threads", "8", "--framework", "pytorch", "--framework", "tensorflow"),
    )
    assert agent_arguments("agents", Path("/r"), (), 8)[-1] == "8"
