"""How the leaders of nodes are started beside the agents; packing of a round."""

from __future__ import annotations

from pathlib import Path

from hetctl.core.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.core.site import Queue, Site
from hetctl.launchers.agents import agent_command, cancel_command, gpus_of, packing_lines
from hetctl.launchers.leaders import LEADERS

COMMAND = ("python", "-m", "hetctl.runtime.exchange", "round.json")


def site(launcher: str, **changes: object) -> Site:
    values = {"nodes": 4, "gpus_per_node": 4, "cores_per_node": 8, "memory_per_node": 2**33}
    queues = (Queue("main"),)
    return Site("s", "slurm", launcher, queues=queues, **{**values, **changes})  # type: ignore[arg-type]


def test_srun_starts_one_on_each_node_although_agents_hold_all_of_it() -> None:
    found = LEADERS["srun"](site("srun", mpi="pmix"), "exchange", ("n2", "n1"), COMMAND)
    assert found.argv == (
        *("srun", "--overlap", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8"),
        *("--gres=none", "--nodelist=n2,n1", "--kill-on-bad-exit=1", "--unbuffered", "--mpi=pmix"),
        *COMMAND,
    )


def test_mpirun_starts_one_program_on_each_node_in_the_order_of_the_nodes() -> None:
    found = LEADERS["mpirun"](site("mpirun", environment={"A": "b c"}), "exchange", ("n2", "n1"), COMMAND)
    each = ("env", "PYTHONUNBUFFERED=1", "A=b c", *COMMAND)
    assert found.argv[-len(each) * 2 - 9 :] == (
        *("-np", "1", "--host", "n2:1", *each),
        *(":", "-np", "1", "--host", "n1:1", *each),
    )
    assert found.environment["OMPI_MCA_plm_rsh_agent"] == "blaunch"


def test_gpus_are_in_the_order_of_the_ranks() -> None:
    placement = (Placement("n2", (1, 3)), Placement("n1", (0,)))
    allocation = Allocation("m", 3, DATA_PARALLEL, 1.0, placement)
    assert gpus_of(allocation) == (("n2", 1), ("n2", 3), ("n1", 0))


def test_an_agent_ends_a_job_of_slurm_alone() -> None:
    assert cancel_command({"SLURM_JOB_ID": "17"}) == ("scancel", "17")
    assert cancel_command({"LSB_JOBID": "17"}) is None


def test_packing_shows_each_node_with_its_members_and_says_who_straddles() -> None:
    allocations = [
        Allocation("a", 3, DATA_PARALLEL, 1.0, (Placement("n1", (2, 3)), Placement("n2", (0,)))),
        Allocation("b", 2, DATA_PARALLEL, 1.0, (Placement("n1", (0, 1)),)),
    ]
    assert list(packing_lines(allocations)) == [
        "n1: a on 2, 3 (2 of its 3); b on 0, 1",
        "n2: a on 0 (1 of its 3)",
    ]


def test_an_agent_is_told_of_its_driver_and_the_framework() -> None:
    command = agent_command(Path("/r/round-0000"), "pytorch", 8, "python")
    assert command == (
        *("python", "-m", "hetctl.runtime.agent", "/r/round-0000/driver.json", "--threads", "8"),
        *("--framework", "pytorch"),
    )
    assert agent_command(Path("/r"), None, 8, "python")[-1] == "8"
