"""Variables of commands: places among ranks, and the GPUs that each sees."""

from __future__ import annotations

import os

import pytest

from hetctl.runtime.worker.scripts.command_environment import (
    RankDevice,
    Rendezvous,
    horovod_scopes,
    rank_variables,
    search_path,
    visible_devices,
)

DEVICES = (RankDevice("n1", 2), RankDevice("n1", 3), RankDevice("n2", 0))


def test_ranks_have_their_places_on_nodes():
    second, third = (rank_variables(rank, DEVICES, Rendezvous("10.0.0.1", 4242, "ib0")) for rank in (1, 2))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "HOROVOD_CROSS_SIZE")
    assert [second[name] for name in names] == ["1", "3", "1", "2", "0", "1"]
    assert [third[name] for name in names] == ["2", "3", "0", "1", "1", "2"]
    assert (third["MASTER_ADDR"], third["MASTER_PORT"]) == ("10.0.0.1", "4242")
    assert third["GLOO_SOCKET_IFNAME"] == "ib0"
    assert "GLOO_SOCKET_IFNAME" not in rank_variables(0, DEVICES[:1], Rendezvous("127.0.0.1", 1, None))


def test_ranks_of_horovod_meet_where_they_are_told():
    of_horovod = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4243"}
    rendezvous = Rendezvous("10.0.0.1", 1, "ib0", of_horovod)
    found = rank_variables(2, DEVICES, rendezvous)
    names = ("CONTROLLER", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT", "GLOO_IFACE", "HOSTNAME")
    assert [found[f"HOROVOD_{name}"] for name in names] == ["gloo", "10.0.0.1", "4243", "ib0", "n2"]
    assert (found["HOROVOD_CROSS_RANK"], found["HOROVOD_CROSS_SIZE"]) == ("1", "2")
    scopes = {"global": 3, "local_n1": 2, "local_n2": 1, "cross_0": 2, "cross_1": 1}
    assert horovod_scopes(DEVICES) == scopes


def test_the_gpu_of_a_local_rank_has_its_number():
    assert visible_devices(1, DEVICES, {}) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert visible_devices(2, DEVICES, {}) == {"CUDA_VISIBLE_DEVICES": "0"}


def test_devices_that_a_batch_system_has_given_are_kept():
    given = {"ROCR_VISIBLE_DEVICES": "4,5,6,7"}
    assert visible_devices(0, DEVICES, given) == {"ROCR_VISIBLE_DEVICES": "6,7"}


def test_slots_see_no_device():
    assert visible_devices(0, (RankDevice("n1", None),), {"CUDA_VISIBLE_DEVICES": "0"}) == {}


@pytest.mark.parametrize(
    ("inherited", "path"),
    [({"PATH": "/usr/bin:/bin"}, "/usr/bin:/bin:/venv/bin"), ({}, f"{os.defpath}:/venv/bin")],
)
def test_the_python_of_the_site_is_found_last(inherited, path):
    assert search_path(inherited, "/venv/bin/python3.11") == {"PATH": path}
