"""States of visits become checkpoints in the background, one after another, or end the rank."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest

from hetctl.runtime.worker.checkpoint import Arrays, CheckpointFolder, Manifest, TrainingState
from hetctl.runtime.worker.state_saver import MOST_WAITING, StateSaver, UnsavedState
from hetctl.storage.event_files import EventWriter

PATIENCE_S = 60.0


class SlowDisk(CheckpointFolder):
    """Folder that writes when `may_write` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_write = threading.Event()

    def save(self, arrays: Arrays, state: TrainingState, since: int | None = None) -> Manifest:
        assert self.may_write.wait(PATIENCE_S)
        return super().save(arrays, state, since)


def unsaved(folder: CheckpointFolder, number: int, reports: list[int]) -> UnsavedState:
    state = TrainingState(part_samples=10 * (number + 1), visited=(number,), visit=number)
    events = EventWriter(folder.path, "m")
    arrays = {"w": np.full(3, number)}
    return UnsavedState(folder, arrays, state, -1, lambda saved, _: reports.append(saved.state.visit), events)


def test_states_are_written_in_their_order(tmp_path: Path) -> None:
    folder, saver, reports = SlowDisk(tmp_path), StateSaver(), list[int]()
    for number in range(MOST_WAITING):
        saver.save(unsaved(folder, number, reports))
    assert (saver.is_busy, reports) == (True, [])
    folder.may_write.set()
    saver.finish()
    assert (saver.is_busy, saver.failure, reports) == (False, None, [0, 1, 2])
    assert folder.load().state.visit == 2
    saver.close()


def test_a_rank_waits_while_too_many_states_do(tmp_path: Path) -> None:
    folder, saver, reports = SlowDisk(tmp_path), StateSaver(), list[int]()
    signs = []

    def sign() -> None:
        signs.append(len(reports))
        folder.may_write.set()

    for number in range(MOST_WAITING):
        saver.save(unsaved(folder, number, reports), sign)
    assert signs == []
    saver.save(unsaved(folder, 3, reports), sign)
    assert signs[0] == 0
    assert reports[0] == 0
    saver.close()
    assert reports == [0, 1, 2, 3]


def test_the_first_failure_is_kept_and_ends_all(tmp_path: Path) -> None:
    class Full(CheckpointFolder):
        def save(self, _arrays: Arrays, state: TrainingState, _since: int | None = None) -> Manifest:
            raise OSError(errno.ENOSPC, f"full at {state.visit}")

    told, reports = threading.Event(), list[int]()
    saver = StateSaver(told.set)
    first = unsaved(Full(tmp_path), 0, reports)
    saver.save(first)
    assert told.wait(PATIENCE_S)
    saver.finish()
    assert saver.failure is not None
    assert saver.failure.events is first.events
    with pytest.raises(OSError, match="full at 0"):
        saver.check()
    with pytest.raises(OSError, match="full at 0"):
        saver.save(unsaved(CheckpointFolder(tmp_path), 1, reports))
    saver.close()
    assert reports == []
