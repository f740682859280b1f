"""Variables of users' commands, and reasons for which they fail."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack

import pytest

from hetctl.model.ensemble import Member
from hetctl.model.events import ExitReason
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.reporting import BUSY_GPU, failure_reason
from hetctl.runtime.worker.scripts.command_run import (
    RankDevice,
    command_environment,
    command_failure,
    horovod_scopes,
    rank_variables,
    search_path,
    visible_devices,
)


@pytest.mark.parametrize(
    ("code", "errors", "killed_for_memory", "reason"),
    [
        (-signal.SIGKILL, "", True, ExitReason.OUT_OF_MEMORY),
        (-signal.SIGKILL, "", False, ExitReason.PROGRAM_ERROR),
        (1, "torch.OutOfMemoryError: CUDA out of memory", False, ExitReason.OUT_OF_MEMORY),
        (1, "RuntimeError: CUDA error: out of memory", False, ExitReason.OUT_OF_MEMORY),
        (1, "RESOURCE_EXHAUSTED: Out of memory while trying to allocate", False, ExitReason.OUT_OF_MEMORY),
        (1, f"RuntimeError: CUDA error: {BUSY_GPU[1]}\nA\nB\nC\nD\nE", False, ExitReason.GPU_BUSY),
        (1, "OSError: [Errno 28] No space left on device: 'x.pt'", False, ExitReason.DISK_FULL),
        (1, "OSError: [Errno 122] Disk quota exceeded", False, ExitReason.DISK_FULL),
        (1, "ValueError: no", False, ExitReason.PROGRAM_ERROR),
    ],
)
def test_the_reason_of_a_failed_command_is_found(code, errors, killed_for_memory, reason):
    assert failure_reason(command_failure(code, errors, {}, is_out_of_memory=killed_for_memory)) is reason


TRACEBACK = """\
step 1
[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 5, in <module>
[rank0]:     dist.init_process_group("nccl")
[rank0]:   File "c10d.py", line 2181, in _new_process_group_helper
[rank0]:     raise RuntimeError("NCCL is not there")
[rank0]: RuntimeError: NCCL is not there
"""


def test_the_cause_of_a_traceback_is_its_error():
    error = command_failure(1, TRACEBACK, {})
    assert error.message == "the command has ended with exit code 1: RuntimeError: NCCL is not there"
    missing = "ModuleNotFoundError: No module named 'torch'"
    assert "started by /bin/sh: install" in command_failure(1, missing, {"PATH": "/bin"}, "sh").hint
    assert command_failure(1, "no 'x'\n    full_key: m.x\n", {}).message.endswith(": no 'x' / full_key: m.x")


@pytest.mark.parametrize(
    ("errors", "is_told"),
    [
        (TRACEBACK, True),
        ("RuntimeError: No CUDA GPUs are available", True),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ("KeyError: 'RANK'", False),
    ],
)
def test_a_failure_at_its_place_names_the_variables(errors, is_told):
    told = {"RANK": "0", "CUDA_VISIBLE_DEVICES": "3", "HOME": "/home/a", "API_KEY": "secret"}
    hint = command_failure(1, errors, told).hint
    assert ("CUDA_VISIBLE_DEVICES=3 RANK=0;" in hint) is is_told
    assert "secret" not in hint


DEVICES = (RankDevice("n1", 2), RankDevice("n1", 3), RankDevice("n2", 0))


def test_ranks_have_their_places_on_nodes():
    second, third = (rank_variables(rank, DEVICES, "10.0.0.1", 4242, "ib0", {}) for rank in (1, 2))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "HOROVOD_CROSS_SIZE")
    assert [second[name] for name in names] == ["1", "3", "1", "2", "0", "1"]
    assert [third[name] for name in names] == ["2", "3", "0", "1", "1", "2"]
    assert (third["MASTER_ADDR"], third["MASTER_PORT"]) == ("10.0.0.1", "4242")
    assert third["GLOO_SOCKET_IFNAME"] == "ib0"
    assert "GLOO_SOCKET_IFNAME" not in rank_variables(0, DEVICES[:1], "127.0.0.1", 1, None, {})


def test_ranks_of_horovod_meet_where_they_are_told():
    of_horovod = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4243"}
    found = rank_variables(2, DEVICES, "10.0.0.1", 1, "ib0", of_horovod)
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


def test_a_script_without_ranks_sees_no_sign_of_them(monkeypatch):
    binding = Binding("n1", 3, None, (0,))
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID", "MASTER_ADDR", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "2")
    with ExitStack() as keep:
        for ranks, seen in {"gpus": {"RANK", "HOROVOD_RANK"}, "none": set()}.items():
            member = Member("a", command=("run",), ranks=ranks, environment={"RANK_OF": "mine"})
            found = command_environment(Group(), binding, member, {"HETCTL_RUN": "own"}, keep)
            assert {"RANK", "HOROVOD_RANK"} & found.keys() == seen
            assert {name: found[name] for name in ("RANK_OF", "HETCTL_RUN", "SLURM_JOB_ID")} == {
                "RANK_OF": "mine",
                "HETCTL_RUN": "own",
                "SLURM_JOB_ID": "2",
            }
        assert {"WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID", "MASTER_ADDR"}.isdisjoint(found)


@pytest.mark.parametrize(
    ("inherited", "path"),
    [
        ({"PATH": "/usr/bin:/bin"}, "/venv/bin:/usr/bin:/bin"),
        (
            {"PATH": "/module/bin:/usr/local/bin:/bin:/more"},
            "/module/bin:/usr/local/bin:/venv/bin:/bin:/more",
        ),
        ({"PATH": "/module/bin"}, "/module/bin:/venv/bin"),
        ({}, f"/venv/bin:{os.defpath}"),
    ],
)
def test_the_python_of_the_site_is_found_before_that_of_the_system(inherited, path):
    assert search_path(inherited, "/venv/bin/python3.11") == {"PATH": path}
