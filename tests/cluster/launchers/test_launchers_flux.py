from __future__ import annotations

from dataclasses import replace

from hetctl.cluster.launchers import LAUNCHERS, ResourceSet
from hetctl.cluster.launchers.flux import SURVIVING
from hetctl.model.site import MEMBERS, Queue, Site

SITE = Site("s", "flux", "flux", 4, 2, 8, 2**36, (Queue("q"),), environment={"KEY": "a b"}, mpi="cray-pals")
START = LAUNCHERS["flux"].agents


def test_one_step_has_all_nodes_and_goes_on_without_one() -> None:
    found = START(SITE, "agents", [ResourceSet("n1", (0, 1)), ResourceSet("n2", (0, 1))], ("python", "x"))
    assert found.argv == (
        *("flux", "run", "--job-name=agents", "--nodes=2", "--tasks-per-node=1", "--exclusive"),
        *("--setopt=exit-timeout=none", "--setopt=cpu-affinity=off", "--setopt=gpu-affinity=off"),
        *("--unbuffered", "--setopt=pmi=cray-pals", "env", "HETCTL_NODE={{node.name}}"),
        *("sh", "-c", SURVIVING, "agent", "python", "x"),
    )
    assert found.environment == {"PYTHONUNBUFFERED": "1", "KEY": "a b"}


def test_a_member_has_its_share_of_its_nodes() -> None:
    site = replace(SITE, launch=MEMBERS, mpi=None)
    found = START(site, "r/m", [ResourceSet("n1", (1,)), ResourceSet("n2", (0,))], ("python",))
    assert found.argv[5:9] == ("--requires=hosts:n[1-2]", "--cores=8", "--gpus-per-node=1", "--unbuffered")
