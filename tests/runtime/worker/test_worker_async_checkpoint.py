"""Checkpoints are written one at a time while training goes on, and none is forgotten."""

from __future__ import annotations

import errno
import threading
import time

import numpy as np
import pytest

from hetctl.model.training_progress import EpochResult
from hetctl.runtime.worker.async_checkpoint import Saver
from hetctl.runtime.worker.checkpoint import CheckpointFolder, TrainingState


def state(epochs):
    return TrainingState(tuple(EpochResult(n, {"loss": 1.0}, 1.0, 1, 0.0) for n in range(1, epochs + 1)))


class SlowFolder(CheckpointFolder):
    """Writes as soon as it may."""

    def __init__(self, path):
        super().__init__(path)
        self.may_write = threading.Event()
        self.busy = threading.Lock()

    def save(self, arrays, state):
        assert self.busy.acquire(blocking=False), "two checkpoints are written at once"
        self.may_write.wait(10)
        try:
            return super().save(arrays, state)
        finally:
            self.busy.release()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    folder, reports = SlowFolder(tmp_path), []
    saver = Saver(folder)
    saver.save({"w": np.ones(3)}, state(1), lambda manifest, _: reports.append(manifest.state.order))
    saver.check()
    assert reports == []
    folder.may_write.set()
    saver.wait()
    assert reports == [(1, 0)]
    assert folder.load().state.order == (1, 0)


def test_what_is_written_is_what_the_arrays_held_when_they_were_handed_over(tmp_path):
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
        assert loaded.state.order == (epochs, 0)
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
    assert reports == [(1, 0), (2, 0), (3, 0)]
    saver.wait()  # again is no error


def test_what_could_not_be_written_is_raised_and_not_reported(tmp_path):
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
    assert reports == []


def keep_checking(saver):
    end = time.monotonic() + 5
    while time.monotonic() < end:
        saver.check()
