"""All-reduces of a site: groups to form, bandwidths, and GPUs without direct access."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.cluster.launchers.agents import gpus_of
from hetctl.model.site import Node
from hetctl.model.training_settings import FRAMEWORKS, PYTORCH, TENSORFLOW
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.driver.probe import groups_on
from hetctl.runtime.frameworks import GLOO, NCCL, framework_of_groups, load_framework
from hetctl.runtime.worker.measuring import probe_tasks
from hetctl.runtime.worker.measuring.probe_tasks import SIZE_BYTES
from hetctl.storage.probe_files import AllReduce, RankTime, bus_gb_per_s, speed_of


def test_every_backend_has_a_size_of_all_reduce():
    assert set(SIZE_BYTES) == {NCCL, GLOO}


@pytest.mark.parametrize(
    ("size", "ranks", "seconds", "gb_per_s"),
    [
        (10**9, 2, 1.0, 1.0),
        (10**9, 8, 1.0, 1.75),
        # What nccl-tests printed on two machines: time in us, and busbw.
        (8 * 2**30, 8, 17_887e-6, 840.41),
        (8 * 2**30, 16, 33_605e-6, 479.28),
    ],
)
def test_the_bus_bandwidth_is_that_of_nccl_tests(size, ranks, seconds, gb_per_s):
    assert bus_gb_per_s(size, ranks, seconds) == pytest.approx(gb_per_s, rel=1e-4)


@pytest.mark.parametrize(
    ("nodes", "groups"),
    [
        ([Node("n1", (0,))], []),
        ([Node("n1", (0, 1))], [("all-reduce-n1", [("n1", 0), ("n1", 1)])]),
        ([Node("n1", (0,)), Node("n2", (0,))], [("all-reduce", [("n1", 0), ("n2", 0)])]),
        (
            [Node("n1", (0, 1)), Node("n2", (0,))],
            [
                ("all-reduce-n1", [("n1", 0), ("n1", 1)]),
                ("all-reduce", [("n1", 0), ("n1", 1), ("n2", 0)]),
            ],
        ),
    ],
)
def test_groups_are_of_the_gpus_of_a_node_and_then_of_all(nodes, groups):
    formed = list(groups_on(nodes))
    assert [(name, list(gpus_of(placement, 2))) for name, placement in formed] == groups


def test_the_speed_of_a_group_is_that_of_its_ranks_on_average():
    ranks = [
        RankTime("all-reduce", f"n{1 + rank // 2}", rank % 2, NCCL, 4 * 10**9, seconds)
        for rank, seconds in enumerate((1.0, 2.0, 2.0, 3.0))
    ]
    assert speed_of("pytorch", ranks) == AllReduce("pytorch", NCCL, ("n1", "n2"), 4, 4 * 10**9, 2.0, 3.0)


@pytest.mark.training
def test_a_framework_is_found_with_all_that_its_groups_take(monkeypatch):
    assert framework_of_groups() == "tensorflow"
    missing = ("tensorflow", "no_such_package")
    monkeypatch.setitem(FRAMEWORKS, "tensorflow", replace(TENSORFLOW, packages=missing))
    assert framework_of_groups() == "pytorch"
    monkeypatch.setitem(FRAMEWORKS, "pytorch", replace(PYTORCH, packages=("no_such_package",)))
    assert framework_of_groups() is None


@pytest.mark.training
def test_gpus_that_pytorch_does_not_see_are_out_of_reach(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert load_framework("pytorch").without_peer_access(0, 3) == (1, 2)


@pytest.mark.training
@pytest.mark.parametrize(("value", "unreached"), [(None, ()), ("0", ()), ("1", (0, 2))])
def test_no_gpu_is_in_reach_if_p2p_is_disabled(monkeypatch, value, unreached):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("NCCL_P2P_DISABLE", value)
    framework, second = load_framework("tensorflow"), Binding("n1", 1, 1, (0,))
    assert probe_tasks._unreached(framework, second, 3) == unreached
