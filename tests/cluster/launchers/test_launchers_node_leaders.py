"""How the leaders of nodes are started beside the agents."""

from __future__ import annotations

from hetctl.cluster.launchers.node_leaders import LEADERS
from hetctl.model.site import Queue, Site

COMMAND = ("python", "-m", "hetctl.runtime.data.node_exchange", "lineups.jsonl")


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
