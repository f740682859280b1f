"""Reasons for trainers to pause: request of the driver, deadline, epochs longer than a job."""

from __future__ import annotations

import errno
import time

import pytest

from hetctl.model.errors import BadInputError, TransientInputError
from hetctl.model.events import ExitReason
from hetctl.runtime.worker.member_trainer import StopSignal
from hetctl.runtime.worker.reporting import BUSY_GPU, failure_reason


class ResourceExhaustedError(Exception):
    """Error with the name of TensorFlow's."""


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def nothing():
    """Return None: the driver has requested no stop."""


def test_the_first_reason_stands():
    told = iter([None, "resize", "preempted"])
    stop = StopSignal(lambda: next(told), time.time() + 60)
    assert not stop()
    assert stop()
    assert stop()
    assert stop.reason == "resize"


def test_the_deadline_is_seen_without_the_driver():
    stop = StopSignal(nothing, time.time() - 1)
    assert stop()
    assert stop.reason == "deadline"


@pytest.mark.parametrize(
    ("seconds", "max_uninterrupted_s", "room"),
    [(50, 100, True), (70, 100, False), (101, 100, True), (70, None, False), (1e9, None, False)],
)
def test_an_epoch_longer_than_a_job_is_trained_in_parts(seconds, max_uninterrupted_s, room):
    stop = StopSignal(nothing, time.time() + 60, max_uninterrupted_s)
    assert stop.permits(seconds) is room
    assert stop.reason == (None if room else "deadline")


def test_after_the_deadline_not_even_a_part_is_begun():
    assert not StopSignal(nothing, time.time() - 1, 100).permits(1000)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such layer"), ExitReason.PROGRAM_ERROR),
        (BadInputError("wrong"), ExitReason.BAD_INPUT),
        (chained(BadInputError("other variables"), RuntimeError("size mismatch")), ExitReason.BAD_INPUT),
        (chained(BadInputError("other variables"), MemoryError()), ExitReason.OUT_OF_MEMORY),
        (TransientInputError("there is no partition"), ExitReason.PROGRAM_ERROR),
        (
            chained(TransientInputError("x.jpg cannot be decoded"), OSError(errno.EIO, "")),
            ExitReason.DISK_ERROR,
        ),
        (FileNotFoundError(errno.ENOENT, "gone"), ExitReason.PROGRAM_ERROR),
        (MemoryError(), ExitReason.OUT_OF_MEMORY),
        (ResourceExhaustedError("OOM when allocating tensor"), ExitReason.OUT_OF_MEMORY),
        (chained(RuntimeError("train_fn failed"), MemoryError()), ExitReason.OUT_OF_MEMORY),
        (RuntimeError(f"CUDA error: {BUSY_GPU[0]}\nCompile with .."), ExitReason.GPU_BUSY),
        (RuntimeError(f"cudaSetDevice() on GPU:0 failed. Status: {BUSY_GPU[1]}"), ExitReason.GPU_BUSY),
        (OSError(errno.ENOSPC, "No space left on device"), ExitReason.DISK_FULL),
        (OSError(errno.EDQUOT, "Quota exceeded"), ExitReason.DISK_FULL),
        (chained(RuntimeError("cannot save"), OSError(errno.ENOSPC, "full")), ExitReason.DISK_FULL),
    ],
)
def test_full_memory_and_full_disk_differ_from_program_errors(error, reason):
    assert failure_reason(error) is reason
