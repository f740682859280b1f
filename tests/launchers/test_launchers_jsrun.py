from __future__ import annotations

import pytest

from hetctl.core.errors import InfeasibleError
from hetctl.core.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.core.site import Queue, Site
from hetctl.launchers import LAUNCHERS, Step

SUMMIT = Site("summit", "lsf", "jsrun", 4608, 6, 42, 512 * 2**30, (Queue("batch"),))


def step(*counts: int) -> Step:
    placement = tuple(Placement(f"h{i}", tuple(range(k))) for i, k in enumerate(counts))
    allocation = Allocation("m", sum(counts), DATA_PARALLEL, 1.0, placement)
    return LAUNCHERS["jsrun"](SUMMIT, allocation, ("python",))


@pytest.mark.parametrize(
    ("counts", "flags"),
    [
        ((1,), "--nrs=1 --rs_per_host=1 --tasks_per_rs=1 --cpu_per_rs=7 --gpu_per_rs=1"),
        ((4,), "--nrs=1 --rs_per_host=1 --tasks_per_rs=4 --cpu_per_rs=28 --gpu_per_rs=4"),
        ((6, 6), "--nrs=2 --rs_per_host=1 --tasks_per_rs=6 --cpu_per_rs=42 --gpu_per_rs=6"),
    ],
)
def test_one_resource_set_per_node(counts: tuple[int, ...], flags: str) -> None:
    found = step(*counts)
    rest = "--launch_distribution=packed --bind=packed:7 --latency_priority=gpu-cpu -X 1 python"
    assert found.argv == ("jsrun", *flags.split(), *rest.split())
    assert found.host_file is None


def test_uneven_nodes_are_refused() -> None:
    with pytest.raises(InfeasibleError, match=r"m: \[6, 2\] GPUs on 2 nodes"):
        step(6, 2)
