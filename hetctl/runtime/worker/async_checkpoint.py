"""Writers of checkpoints: threads beside training, or all ranks for their parts."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.serialization import decode, encode
from hetctl.runtime.frameworks import TrainableNetwork
from hetctl.runtime.worker.checkpoint import (
    ArrayFile,
    Arrays,
    CheckpointFolder,
    Manifest,
    TrainingState,
    file_in,
)
from hetctl.runtime.worker.group import Group, all_gather
from hetctl.storage.atomic_io import make_private_folder, sync_folder
from hetctl.storage.event_files import EventWriter

OnSaved = Callable[[Manifest, float], None]
"""Function called with a checkpoint on the disk, and the seconds that writing it took."""


MAX_UNSAVED_STATES = 3
"""Most states that may wait: they occupy the node's memory until they are written."""
POLL_S = 0.1
"""Seconds between two heartbeats of a rank that waits for the writing of a state."""
CHECKED = "shards/{}"
"""Name of a rank's files; the rank with this number checks them when they are read."""


class Saver:
    """Thread that writes one checkpoint at a time, from a copy in memory.

    The copy uses the same memory each time: the kernel clears new memory page by page, which takes longer
    than copying.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._copy: dict[str, npt.NDArray[Any]] = {}
        # Measured with 151 MB and PyTorch: copying takes 14 ms and writing
        # 637 ms, and training loses 60 ms in all.
        self._pool = ThreadPoolExecutor(1, "saver")
        self._last: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._last is not None and not self._last.done()

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written; do not wait for one."""
        if self._last is not None and self._last.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is written and reported.

        Raises
        ------
        OSError
            If it could not be written.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def call_after(self, function: Callable[[], None]) -> None:
        """Call a function as soon as the checkpoint in progress is written and reported, or now without one.

        Raises
        ------
        OSError
            If the last checkpoint could not be written; the function is then not called.
        """
        self.check()
        last = self._last
        if last is None:
            function()
            return

        def call() -> None:
            last.result()
            function()

        self._last = self._pool.submit(call)

    def close(self) -> None:
        """Wait as `wait` does, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def save(self, arrays: Arrays, state: TrainingState, report: OnSaved) -> None:
        """Copy a checkpoint once the previous one is written, and start to write it.

        Parameters
        ----------
        arrays
            State of the network; it may change again after the return.
        report : callable
            Function called in the saver's thread after the checkpoint is written.

        Raises
        ------
        OSError
            If the previous checkpoint could not be written.
        """
        self.wait()
        self._last = self._pool.submit(self._write, self._copies(arrays), state, report)

    def _copies(self, arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
        self._copy = {name: self._copied(name, array) for name, array in arrays.items()}
        return self._copy

    def _copied(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        place = self._copy.get(name)
        if place is None or (place.shape, place.dtype) != (array.shape, array.dtype):
            place = np.empty(array.shape, array.dtype)
        np.copyto(place, array)
        return place

    def _write(self, arrays: Arrays, state: TrainingState, report: OnSaved) -> None:
        began = time.perf_counter()
        if manifest := self._written(arrays, state):
            report(manifest, time.perf_counter() - began)

    def _written(self, arrays: Arrays, state: TrainingState) -> Manifest | None:
        """Write a checkpoint; return None on a rank that does not complete it."""
        return self._folder.save(arrays, state)


class ShardSaver(Saver):
    """Writer of checkpoints by all ranks; training waits until they are on the disk.

    The ranks write into a folder with another name. Rank 0 renames it, then writes the other arrays and the
    manifest: a checkpoint that lacks a part counts as nonexistent.
    """

    def __init__(self, folder: CheckpointFolder, network: TrainableNetwork, group: Group) -> None:
        super().__init__(folder)
        self._network, self._group = network, group

    def save(self, arrays: Arrays, state: TrainingState, report: OnSaved) -> None:
        """Write a checkpoint; `report` is called on rank 0.

        Raises
        ------
        OSError
            If a disk is full or read-only; the earlier checkpoints stay intact.
        """
        self._write(arrays, state, report)

    def _written(self, arrays: Arrays, state: TrainingState) -> Manifest | None:
        folder = self._folder.new_shards(state)
        if self._group.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            make_private_folder(folder)
        # The others wait for this before they write into it.
        self._group.broadcast(True)
        try:
            self._network.write_shards(folder)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        rank = self._group.rank
        own = [*folder.glob(f"__{rank}_*"), *(folder.glob(".metadata") if rank == 0 else ())]
        # Each rank computes the checksums of its own files.
        files = [encode(file_in(folder, path, (CHECKED.format(rank),))) for path in sorted(own)]
        of_ranks = all_gather(self._group, files)
        if rank != 0:
            return None
        final = self._folder.free_shards(state)
        sync_folder(folder)
        folder.rename(final)
        shards = [decode(ArrayFile, file) for each in of_ranks for file in each]
        named = [replace(shard, file=f"{final.name}/{shard.file}") for shard in shards]
        return self._folder.save(arrays, state, shards=named)


class StateSaver:
    """Thread that writes states one after another, after their members have hopped on.

    Parameters
    ----------
    on_failure : callable
        Function called in the thread after a state could not be written.

    Attributes
    ----------
    failure : tuple of Exception and EventWriter, or None
        The first failure, with the events of its member: the rank may have no task when it fails.
    """

    def __init__(self, on_failure: Callable[[], None] = lambda: None) -> None:
        self.failure: tuple[Exception, EventWriter] | None = None
        self._on_failure = on_failure
        self._pool = ThreadPoolExecutor(1, "states")
        self._waiting: deque[Future[None]] = deque()

    @property
    def is_busy(self) -> bool:
        """True if a state is still to be written."""
        return any(not future.done() for future in self._waiting)

    def save(self, write: Callable[[], None], events: EventWriter, heartbeat: Callable[[], None]) -> None:
        """Have a state written after the earlier ones; block while too many wait.

        Parameters
        ----------
        write : callable
            Function that writes the state, called in the thread.
        events : EventWriter
            Events of the member.
        heartbeat : callable
            Function called repeatedly while it blocks.

        Raises
        ------
        Exception
            The error of an earlier state that could not be written.
        """
        self.check()
        self._waiting.append(self._pool.submit(self._write, write, events))
        while len(self._waiting) > MAX_UNSAVED_STATES:
            if wait([self._waiting[0]], POLL_S).done:
                self._waiting.popleft()
            heartbeat()

    def check(self) -> None:
        """Raise the error of a state that could not be written; do not wait for one."""
        if self.failure is not None:
            raise self.failure[0]

    def finish(self) -> tuple[Exception, EventWriter] | None:
        """Wait until all states are written, or have failed; return the first failure."""
        wait(self._waiting)
        return self.failure

    def close(self) -> None:
        """Wait as `finish` does, and end the thread."""
        self._pool.shutdown()

    def _write(self, write: Callable[[], None], events: EventWriter) -> None:
        if self.failure is not None:
            return
        try:
            write()
        except Exception as error:
            self.failure = error, events
            self._on_failure()
