"""Checkpoints written while training continues."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.runtime.worker.checkpoint import Arrays, CheckpointFolder, Manifest, TrainingState

Report = Callable[[Manifest, float], None]
"""Function called with a checkpoint that is on the disk, and the seconds that writing it took."""


class Saver:
    """Thread that writes one checkpoint at a time, from a copy in memory.

    The copy uses the same memory each time: the kernel clears new memory page by page, which takes longer
    than copying.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._copy: dict[str, npt.NDArray[Any]] = {}
        self._pool = ThreadPoolExecutor(1, "saver")
        self._last: Future[None] | None = None

    def save(self, arrays: Arrays, state: TrainingState, report: Report) -> None:
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
        self._copy = {name: self._copied(name, array) for name, array in arrays.items()}
        self._last = self._pool.submit(self._write, self._copy, state, report)

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

    def close(self) -> None:
        """Wait as `wait` does, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _copied(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        place = self._copy.get(name)
        if place is None or (place.shape, place.dtype) != (array.shape, array.dtype):
            place = np.empty(array.shape, array.dtype)
        np.copyto(place, array)
        return place

    def _write(self, arrays: Arrays, state: TrainingState, report: Report) -> None:
        began = time.perf_counter()
        manifest = self._folder.save(arrays, state)
        report(manifest, time.perf_counter() - began)
