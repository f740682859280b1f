"""Checkpoints are written one at a time, while training continues."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hetctl.model.training_progress import EpochResult
from hetctl.runtime.worker.async_checkpoint import MAX_UNSAVED_STATES, Saver, StateSaver
from hetctl.runtime.worker.checkpoint import CheckpointFolder, TrainingState
from hetctl.storage.event_files import EventWriter

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


def test_training_goes_on_beside_a_write_and_the_next_one_waits_for_it(tmp_path):
    folder, reports = SlowFolder(tmp_path), []
    saver = Saver(folder)
    for epochs in (1, 2, 3):
        saver.save({"w": np.ones(3)}, state(epochs), lambda manifest, _: reports.append(manifest.state.order))
        if epochs == 1:
            saver.check()
            assert reports == []
            threading.Timer(0.2, folder.may_write.set).start()
    saver.wait()
    assert reports == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
    assert folder.load().state.order == (3, 0, 0)
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


class Writes:
    """Writes of states, which wait until `may_write` is set."""

    def __init__(self):
        self.may_write, self.done = threading.Event(), []
        self.events = EventWriter(Path(), "m")

    def of(self, number):
        def write():
            assert self.may_write.wait(PATIENCE_S)
            self.done.append(number)

        return write, self.events


def test_states_are_written_in_their_order_and_a_rank_waits_while_too_many_do():
    writes, saver = Writes(), StateSaver()
    signs = []

    def sign():
        signs.append(len(writes.done))
        writes.may_write.set()

    for number in range(MAX_UNSAVED_STATES):
        saver.save(*writes.of(number), sign)
    assert (saver.is_busy, writes.done, signs) == (True, [], [])
    saver.save(*writes.of(3), sign)
    assert signs[0] == 0
    assert writes.done[0] == 0
    assert saver.finish() is None
    assert (saver.is_busy, writes.done) == (False, [0, 1, 2, 3])
    saver.close()


def test_the_first_failure_is_kept_and_ends_all():
    def fail():
        raise OSError(errno.ENOSPC, "full")

    told, writes = threading.Event(), Writes()
    writes.may_write.set()
    saver = StateSaver(told.set)
    saver.save(fail, writes.events, lambda: None)
    assert told.wait(PATIENCE_S)
    failure = saver.finish()
    assert failure is not None
    assert failure[1] is writes.events
    with pytest.raises(OSError, match="full"):
        saver.check()
    with pytest.raises(OSError, match="full"):
        saver.save(*writes.of(1), lambda: None)
    saver.close()
    assert writes.done == []
