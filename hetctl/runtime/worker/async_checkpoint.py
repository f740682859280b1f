"""Writers of checkpoints in a thread, while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.runtime.worker.checkpoint import Arrays, CheckpointFolder, Manifest, TrainingState

OnSaved = Callable[[Manifest, float], None]
"""Function called with a checkpoint that is on the disk, and the seconds that writing it took."""


class BackgroundWriter:
    """Thread that writes one checkpoint at a time."""

    def __init__(self) -> None:
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

    def _begin(self, write: Callable[[Arrays, TrainingState, OnSaved], None], *what: Any) -> None:
        """Call a function in the thread with what is to be written; the previous call has returned."""
        self._last = self._pool.submit(write, *what)


class Saver(BackgroundWriter):
    """Writer of whole checkpoints, from a copy in memory.

    The copy uses the same memory each time: the kernel clears new memory page by page, which takes longer
    than copying.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        super().__init__()
        self._folder = folder
        self._copy: dict[str, npt.NDArray[Any]] = {}

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
        self._copy = {name: self._copied(name, array) for name, array in arrays.items()}
        self._begin(self._write, self._copy, state, report)

    def _copied(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        place = self._copy.get(name)
        if place is None or (place.shape, place.dtype) != (array.shape, array.dtype):
            place = np.empty(array.shape, array.dtype)
        np.copyto(place, array)
        return place

    def _write(self, arrays: Arrays, state: TrainingState, report: OnSaved) -> None:
        began = time.perf_counter()
        manifest = self._folder.save(arrays, state)
        report(manifest, time.perf_counter() - began)
