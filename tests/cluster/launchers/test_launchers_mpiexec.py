from __future__ import annotations

from dataclasses import replace

from hetctl.cluster.launchers import LAUNCHERS, ResourceSet
from hetctl.model.site import MEMBERS, Queue, Site

SITE = Site("s", "pbs", "mpiexec", 4, 2, 8, 2**36, (Queue("q"),), environment={"KEY": "a b"}, mpi="pmix")
AURORA = replace(SITE, visible_devices="ZE_AFFINITY_MASK")
MPIEXEC = LAUNCHERS["mpiexec"]


def test_all_nodes_with_the_same_gpus_are_one_program() -> None:
    sets = [ResourceSet("n1", (0, 1)), ResourceSet("n2", (0, 1))]
    found = MPIEXEC.agents(AURORA, "agents", sets, ("python", "x"))
    assert found.argv == (
        *(
            "mpiexec",
            "--ppn",
            "1",
            "--hosts",
            "n1,n2",
            "--cpu-bind",
            "none",
            "--no-transfer",
            "--line-buffer",
        ),
        *("--no-abort-on-failure", "--pmi=pmix", "-n", "2", "env", "ZE_AFFINITY_MASK=0,1", "python", "x"),
    )
    assert found.environment == {"PYTHONUNBUFFERED": "1", "KEY": "a b"}


def test_a_member_has_a_program_for_each_of_its_sets_of_gpus() -> None:
    sets = [ResourceSet("n1", (1,)), ResourceSet("n2", (0,)), ResourceSet("n3", (0,))]
    found = MPIEXEC.agents(replace(SITE, launch=MEMBERS, mpi=None), "round-0000/m", sets, ("python",))
    assert found.argv[found.argv.index("-n") :] == (
        *("-n", "1", "env", "CUDA_VISIBLE_DEVICES=1", "python"),
        *(":", "-n", "2", "env", "CUDA_VISIBLE_DEVICES=0", "python"),
    )


def test_leaders_are_started_in_the_order_of_the_nodes_and_end_together() -> None:
    assert MPIEXEC.leaders is not None
    found = MPIEXEC.leaders(SITE, "exchange", ("n2", "n1"), ("python", "x"))
    assert found.argv[3:5] == ("--hosts", "n2,n1")
    assert found.argv[-5:] == ("-n", "2", "env", "python", "x")
    assert "--no-abort-on-failure" not in found.argv
