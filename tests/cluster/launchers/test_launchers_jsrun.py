from __future__ import annotations

from dataclasses import replace

from hetctl.cluster.launchers import LAUNCHERS, ResourceSet
from hetctl.model.site import MEMBERS, Queue, Site

SUMMIT = Site("summit", "lsf", "jsrun", 4608, 6, 42, 512 * 2**30, (Queue("batch"),))
REST = ("--latency_priority=gpu-cpu", "--exit_on_error=0", "python")


def test_one_resource_set_is_a_whole_node() -> None:
    sets = [ResourceSet(f"h{number}", tuple(range(6))) for number in range(2)]
    found = LAUNCHERS["jsrun"].agents(SUMMIT, "agents", sets, ("python",))
    assert found.argv == (
        *("jsrun", "--nrs=2", "--rs_per_host=1", "--tasks_per_rs=1", "--cpu_per_rs=42", "--gpu_per_rs=6"),
        *("--launch_distribution=packed", "--bind=none", *REST),
    )


def test_a_member_has_a_resource_set_on_each_of_its_nodes() -> None:
    """FLEET, section 6; "-n1 -a1 -g2 -c14" in the words of OLCF's guide."""
    site = replace(SUMMIT, launch=MEMBERS)
    one = LAUNCHERS["jsrun"].agents(site, "round-0000/m", [ResourceSet("h1", (2, 4))], ("python",))
    assert one.argv == (
        *("jsrun", "--nrs=1", "--rs_per_host=1", "--tasks_per_rs=1", "--cpu_per_rs=14", "--gpu_per_rs=2"),
        *("--launch_distribution=packed", "--bind=rs", *REST),
    )
    two = LAUNCHERS["jsrun"].agents(
        site, "round-0000/m", [ResourceSet("h1", (0, 1, 2)), ResourceSet("h2", (3, 4, 5))], ("python",)
    )
    assert two.argv[1:6] == (
        *("--nrs=2", "--rs_per_host=1", "--tasks_per_rs=1", "--cpu_per_rs=21", "--gpu_per_rs=3"),
    )


def test_slots_are_cores_without_gpus() -> None:
    site = replace(SUMMIT, launch=MEMBERS, device="slot")
    found = LAUNCHERS["jsrun"].agents(site, "round-0000/m", [ResourceSet("h1", (2, 4))], ("python",))
    assert found.argv[4:6] == ("--cpu_per_rs=14", "--gpu_per_rs=0")
