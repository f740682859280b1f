"""Reasons for which commands of users fail."""

from __future__ import annotations

import signal

import pytest

from hetctl.model.exit_reason import ExitReason
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
    assert failure_reason(failure_of(code, errors, is_out_of_memory=killed_for_memory)) is reason
