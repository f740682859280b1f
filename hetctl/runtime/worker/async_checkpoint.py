"""Writers of checkpoints: a thread for whole networks beside training, or all ranks for their parts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
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

OnSaved = Callable[[Manifest, float], None]
"""Function called with a checkpoint on the disk, and the seconds that writing it took."""


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
        shards = self._gathered(folder)
        if self._group.rank != 0:
            return None
        final = self._folder.free_shards(state)
        sync_folder(folder)
        folder.rename(final)
        named = [replace(shard, file=f"{final.name}/{shard.file}") for shard in shards]
        return self._folder.save(arrays, state, shards=named)

    def _gathered(self, folder: Path) -> list[ArrayFile]:
        """Return the files of all ranks; each rank computes the checksums of its own."""
        rank = self._group.rank
        own = [*folder.glob(f"__{rank}_*"), *(folder.glob(".metadata") if rank == 0 else ())]
        files = [encode(file_in(folder, path, (CHECKED.format(rank),))) for path in sorted(own)]
        return [decode(ArrayFile, file) for each in all_gather(self._group, files) for file in each]
