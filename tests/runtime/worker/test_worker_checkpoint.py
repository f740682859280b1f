"""Checkpoints are complete or do not exist; they are written one at a time while training continues."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from hetctl.model.training_progress import EpochResult
from hetctl.runtime.worker.checkpoint import CheckpointFolder, Loaded, Saver, TrainingState

PATIENCE_S = 60.0


def epoch(number):
    return EpochResult(number, {"loss": 1.0 / number, "val_loss": 0.5}, 2.0, 1, 1000.0 + number)


def state(epochs, part=0):
    return TrainingState(tuple(epoch(n) for n in range(1, epochs + 1)), gpus=2, part_samples=part)


def arrays(seed):
    return {"model/0000": np.random.default_rng(seed).normal(size=(5, 3)), "optimizer/0000": np.array(seed)}


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "member" / "run")


def test_a_saved_checkpoint_is_loaded(folder):
    folder.save(arrays(1), state(3, 640))
    loaded = folder.load()
    assert loaded.state == state(3, 640)
    assert not loaded.invalid
    assert {name: value.tolist() for name, value in loaded.arrays.items()} == {
        name: value.tolist() for name, value in arrays(1).items()
    }


def test_nothing_saved_is_nothing_loaded(folder):
    assert folder.load() == Loaded(None, TrainingState(), ())


def test_the_last_two_are_kept(folder):
    for number in (1, 2, 3, 4):
        folder.save(arrays(number), state(number))
    assert sorted(path.name for path in folder.path.iterdir()) == [
        f"epoch-0000{n}-000000000000.{ending}" for n in (3, 4) for ending in ("json", "npz")
    ]


def test_a_partial_epoch_is_newer_than_the_epoch_before(folder):
    folder.save(arrays(1), state(2, 64))
    folder.save(arrays(2), state(2, 128))
    assert folder.load().state.part_samples == 128


def test_visits_and_evaluations_are_in_their_order(folder):
    """Also if the ranks of two nodes finish their checkpoints in the other order."""
    states = [
        replace(state(2, 64), visited=(3,), visit=5),
        replace(state(2, 128), visited=(3, 0), visit=7),
        replace(state(2, 128), visited=(1,), evaluating=True, visit=8),
        replace(state(2, 128), visited=(1, 0), evaluating=True, visit=11),
        replace(state(3), visit=12),
    ]
    for older, newer in pairwise(states):
        folder.save(arrays(1), newer)
        folder.save(arrays(2), older)
        assert folder.load().state == newer
        assert folder.newest_state() == newer


def test_a_state_of_an_undone_visit_costs_no_other(folder):
    """A node that was given up writes states 6 and 7, while others continue from 5 with 8."""
    five, six, seven = (replace(state(2, 64 * n), visited=(0,) * n, visit=n + 4) for n in (1, 2, 3))
    eight = replace(six, visit=8)
    folder.save(arrays(4), replace(state(2), visit=4), since=3)
    for number, each in ((5, five), (8, eight), (6, six), (7, seven)):
        folder.save(arrays(number), each, since=5)
    for number, each in ((5, five), (8, eight)):
        loaded = folder.load(lambda found, number=number: found.visit == number)
        assert (loaded.state, loaded.arrays["optimizer/0000"], loaded.invalid) == (each, number, ())
    assert folder.newest_state() == seven
    assert folder.newest_state(lambda found: found.visit not in (6, 7)) == eight
    assert not list(folder.path.glob("*-000000004.*"))


@pytest.mark.parametrize("ending", ["npz", "json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_a_damaged_checkpoint_is_passed_over(folder, ending, damage):
    folder.save(arrays(1), state(1))
    folder.save(arrays(2), state(2))
    victim = folder.path / f"epoch-00002-000000000000.{ending}"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 0xFF
    victim.write_bytes({"flip": content, "cut": content[:-9], "empty": b"", "gone": b""}[damage])
    if damage == "gone":
        victim.unlink()
    loaded = folder.load()
    assert loaded.state == state(1)
    assert loaded.arrays["optimizer/0000"] == 1
    assert loaded.invalid == (() if (ending, damage) == ("json", "gone") else ("epoch-00002-000000000000",))


def test_training_starts_anew_if_no_checkpoint_is_valid(folder):
    folder.save(arrays(1), state(1))
    (folder.path / "epoch-00001-000000000000.npz").write_bytes(b"")
    assert folder.load() == Loaded(None, TrainingState(), ("epoch-00001-000000000000",))


def test_a_full_disk_leaves_the_earlier_checkpoint(folder, monkeypatch):
    folder.save(arrays(1), state(1))

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        folder.save(arrays(2), state(2))
    monkeypatch.undo()
    assert folder.load().state == state(1)
    assert not list(folder.path.glob("*.tmp"))


def test_modes_do_not_depend_on_the_umask(folder):
    before = os.umask(0)
    try:
        folder.save(arrays(1), state(1))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


# Written while training continues


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


def test_a_trial_inherits_what_its_parent_has_once(folder, tmp_path):
    child = CheckpointFolder(tmp_path / "child")
    child.inherit(folder)
    assert child.load().arrays is None
    folder.save(arrays(1), state(3))
    child.inherit(folder)
    folder.save(arrays(2), state(4))
    child.inherit(folder)
    assert child.load().state == state(3)
    assert child.is_of_parent(state(3))
    assert not child.is_of_parent(state(3, 64))
    assert not child.is_of_parent(state(4))
    assert not folder.is_of_parent(state(3))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
