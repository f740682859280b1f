from __future__ import annotations

from dataclasses import replace

from hetctl.cluster.launchers import LAUNCHERS, ResourceSet
from hetctl.model.site import MEMBERS, Queue, Site

SITE = Site("s", "lsf", "mpirun", 4, 2, 8, 2**36, (Queue("q"),), environment={"KEY": "a b"})
LEADER = ("python", "-m", "hetctl.runtime.data.node_exchange", "lineups.jsonl")


def test_each_node_runs_an_agent_with_its_own_name_and_gpus() -> None:
    sets = [ResourceSet("n1", (0, 1)), ResourceSet("n2", (0, 1))]
    found = LAUNCHERS["mpirun"].agents(SITE, "agents", sets, ("python", "x"))
    common = ("env", "PYTHONUNBUFFERED=1", "KEY=a b")
    assert found.argv == (
        *("mpirun", "--oversubscribe", "--bind-to", "none", "--allow-run-as-root", "--enable-recovery"),
        *("-np", "1", "--host", "n1:1", *common, "HETCTL_NODE=n1", "CUDA_VISIBLE_DEVICES=0,1", "python", "x"),
        ":",
        *("-np", "1", "--host", "n2:1", *common, "HETCTL_NODE=n2", "CUDA_VISIBLE_DEVICES=0,1", "python", "x"),
    )
    assert found.environment["OMPI_MCA_plm_rsh_agent"] == "blaunch"


def test_a_member_sees_its_own_gpus_alone() -> None:
    site = replace(SITE, launch=MEMBERS)
    found = LAUNCHERS["mpirun"].agents(site, "round-0000/m", [ResourceSet("n1", (1,))], ("python", "x"))
    assert found.name == "round-0000/m"
    assert found.argv[6:] == (
        *("-np", "1", "--host", "n1:1", "env", "PYTHONUNBUFFERED=1", "KEY=a b", "HETCTL_NODE=n1"),
        *("CUDA_VISIBLE_DEVICES=1", "python", "x"),
    )


def test_mpirun_starts_leaders_in_the_order_of_the_nodes() -> None:
    start = LAUNCHERS["mpirun"].leaders
    assert start is not None
    found = start(replace(SITE, environment={"A": "b c"}), "exchange", ("n2", "n1"), LEADER)
    each = ("env", "PYTHONUNBUFFERED=1", "A=b c", *LEADER)
    assert found.argv[-len(each) * 2 - 9 :] == (
        *("-np", "1", "--host", "n2:1", *each),
        *(":", "-np", "1", "--host", "n1:1", *each),
    )
    assert found.environment["OMPI_MCA_plm_rsh_agent"] == "blaunch"
