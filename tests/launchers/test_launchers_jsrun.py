from __future__ import annotations

from hetctl.core.site import Node, Queue, Site
from hetctl.launchers import LAUNCHERS

SUMMIT = Site("summit", "lsf", "jsrun", 4608, 6, 42, 512 * 2**30, (Queue("batch"),))


def test_one_resource_set_is_a_whole_node() -> None:
    nodes = [Node(f"h{number}", tuple(range(6))) for number in range(2)]
    found = LAUNCHERS["jsrun"](SUMMIT, nodes, ("python",))
    assert found.argv == (
        *("jsrun", "--nrs=2", "--rs_per_host=1", "--tasks_per_rs=1", "--cpu_per_rs=42", "--gpu_per_rs=6"),
        *("--launch_distribution=packed", "--bind=none", "--latency_priority=gpu-cpu", "--exit_on_error=0"),
        "python",
    )
