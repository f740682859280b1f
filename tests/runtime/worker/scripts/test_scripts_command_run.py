"""Reasons for which commands of users fail."""

from __future__ import annotations

import signal

import pytest

from hetctl.model.events import ExitReason
from hetctl.runtime.worker.reporting import failure_reason
from hetctl.runtime.worker.scripts.command_run import failure_of


@pytest.mark.parametrize(
    ("code", "errors", "killed_for_memory", "reason"),
    [
        (-signal.SIGKILL, "", True, ExitReason.OUT_OF_MEMORY),
        (-signal.SIGKILL, "", False, ExitReason.PROGRAM_ERROR),
        (1, "torch.OutOfMemoryError: CUDA out of memory", False, ExitReason.OUT_OF_MEMORY),
        (1, "RuntimeError: CUDA error: out of memory", False, ExitReason.OUT_OF_MEMORY),
        (1, "RESOURCE_EXHAUSTED: Out of memory while trying to allocate", False, ExitReason.OUT_OF_MEMORY),
        (1, "OSError: [Errno 28] No space left on device: 'x.pt'", False, ExitReason.DISK_FULL),
        (1, "OSError: [Errno 122] Disk quota exceeded", False, ExitReason.DISK_FULL),
        (1, "ValueError: no", False, ExitReason.PROGRAM_ERROR),
    ],
)
def test_the_reason_of_a_failed_command_is_found(code, errors, killed_for_memory, reason):
    assert failure_reason(failure_of(code, errors, {}, is_out_of_memory=killed_for_memory)) is reason


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
    error = failure_of(1, TRACEBACK, {})
    assert error.message == "the command has ended with exit code 1: RuntimeError: NCCL is not there"
    assert failure_of(1, "no 'x'\n    full_key: m.x\n", {}).message.endswith(": no 'x' / full_key: m.x")


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
    hint = failure_of(1, errors, told).hint
    assert ("CUDA_VISIBLE_DEVICES=3 RANK=0;" in hint) is is_told
    assert "secret" not in hint
