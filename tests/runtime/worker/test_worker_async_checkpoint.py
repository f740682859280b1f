"""Checkpoints are written one at a time, while training continues."""

from __future__ import annotations

import errno
import threading
import time

import numpy as np
import pytest

from hetctl.model.training_progress import EpochResult
from hetctl.runtime.worker.async_checkpoint import Saver
from hetctl.runtime.worker.checkpoint import CheckpointFolder, TrainingState

PATIENCE_S = 60.0


def state(epochs):
    return TrainingState(tuple(EpochResult(n, {"loss": 1.0}, 2.0, 1, 1000.0) for n in range(1, epochs + 1)))


class SlowFolder(CheckpointFolder):
    """Folder that writes when `may_write` is set."""

    def __init__(self, path):
        super().__init__(path)
        self.may_write = threading.Event()
        self.busy = threading.Lock()

    def save(self, arrays, state):
        assert self.busy.acquire(blocking=False), "two checkpoints are written at once"
        assert self.may_write.wait(PATIENCE_S)
        try:
            return super().save(arrays, state)
        finally:
            self.busy.release()


def test_training_continues_while_a_checkpoint_is_written(tmp_path):
    folder, reports = SlowFolder(tmp_path), []
    saver = Saver(folder)
    saver.save({"w": np.ones(3)}, state(1), lambda manifest, _: reports.append(manifest.state.order))
    saver.check()
    assert reports == []
    folder.may_write.set()
    saver.wait()
    assert reports == [(1, 0, 0)]
    assert folder.load().state.order == (1, 0, 0)


def test_a_checkpoint_has_the_values_at_the_time_of_the_call(tmp_path):
    folder = SlowFolder(tmp_path)
    saver = Saver(folder)
    arrays = {"w": np.zeros(3), "turned": np.arange(6).reshape(2, 3).T}
    for epochs, own in ((1, arrays), (2, {**arrays, "late": np.ones((2, 2))}), (3, {"w": np.zeros(4, "f4")})):
        folder.may_write.clear()
        own["w"][:] = epochs
        saver.save(own, state(epochs), lambda *_: None)
        own["w"][:] = -1
        folder.may_write.set()
        saver.wait()
        loaded = folder.load()
        assert loaded.state.order == (epochs, 0, 0)
        assert loaded.arrays.keys() == own.keys()
        assert loaded.arrays["w"].dtype == own["w"].dtype
        assert loaded.arrays["w"].tolist() == [epochs] * len(own["w"])
        assert np.array_equal(loaded.arrays.get("turned", arrays["turned"]), arrays["turned"])


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path):
    folder, reports = SlowFolder(tmp_path), []
    saver = Saver(folder)
    threading.Timer(0.2, folder.may_write.set).start()
    for epochs in (1, 2, 3):
        saver.save({"w": np.ones(3)}, state(epochs), lambda manifest, _: reports.append(manifest.state.order))
    saver.wait()
    assert reports == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
    saver.wait()  # again is no error


def test_epochs_are_reported_after_the_checkpoint_before_them(tmp_path):
    folder, reports = SlowFolder(tmp_path), []
    saver = Saver(folder)
    saver.call_after(lambda: reports.append("none in progress"))
    saver.save({"w": np.ones(3)}, state(1), lambda manifest, _: reports.append(manifest.state.order))
    saver.call_after(lambda: reports.append("second"))
    saver.call_after(lambda: reports.append("third"))
    assert (reports, saver.is_busy) == (["none in progress"], True)
    folder.may_write.set()
    saver.wait()
    assert reports == ["none in progress", (1, 0, 0), "second", "third"]


def test_a_failed_write_is_raised_and_not_reported(tmp_path):
    class Full(CheckpointFolder):
        def save(self, *_):
            raise OSError(errno.ENOSPC, "full")

    reports = []
    saver = Saver(Full(tmp_path))
    saver.save({}, state(1), lambda *report: reports.append(report))
    with pytest.raises(OSError, match="full"):
        saver.wait()
    saver.save({}, state(1), lambda *report: reports.append(report))
    with pytest.raises(OSError, match="full"):
        saver.save({}, state(2), lambda *report: reports.append(report))
    saver.save({}, state(2), lambda *report: reports.append(report))
    with pytest.raises(OSError, match="full"):
        keep_checking(saver)
    saver.save({}, state(3), lambda *report: reports.append(report))
    with pytest.raises(OSError, match="full"):
        call_after(saver, lambda: reports.append("after"))
    assert reports == []


def call_after(saver, function):
    """Call a function after the write in progress, which may have failed already."""
    saver.call_after(function)
    saver.wait()


def keep_checking(saver):
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        saver.check()
