from __future__ import annotations

import pytest

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
    assert found.file is None


def test_uneven_nodes_take_a_set_for_each_gpu() -> None:
    flags = "--nrs=8 --rs_per_host=6 --tasks_per_rs=1 --cpu_per_rs=7 --gpu_per_rs=1"
    assert step(6, 2).argv[1:6] == tuple(flags.split())


def test_an_explicit_resource_file_has_a_line_for_each_rank() -> None:
    placement = (Placement("h1", (0, 5)), Placement("h2", (2,)))
    found = LAUNCHERS["jsrun-erf"](SUMMIT, Allocation("m", 3, DATA_PARALLEL, 1.0, placement), ("python",))
    assert found.argv[-4:] == ("jsrun", "-X", "1", "python")
    assert found.file is not None
    assert found.file[3:] == (
        "rank: 0: { hostname: h1; cpu: {0-6} ; gpu: {0,5} }",
        "rank: 1: { hostname: h1; cpu: {35-41} ; gpu: {0,5} }",
        "rank: 2: { hostname: h2; cpu: {14-20} ; gpu: {2} }",
    )
    assert found.argv[:2] == ("sh", "-c")
    assert f'"${found.file_variable}"' in found.argv[2]
