"""A thread that makes batches ahead of the trainer, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread

from hetctl.model.errors import HetctlError
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.data.preprocessors import FILE_SYSTEM

BATCHES_AHEAD = 2
"""Batches that are made while the trainer uses another one."""

Make = Callable[[], Samples]


class BatchThread:
    """Thread that calls functions in their order; it starts with the first one.

    Parameters
    ----------
    patience_s : float
        Time limit in seconds for a batch.

    Attributes
    ----------
    waited_s : float
        Time for which batches were awaited, in seconds.
    """

    def __init__(self, patience_s: float) -> None:
        self.waited_s = 0.0
        self._patience_s = patience_s
        self._orders: SimpleQueue[tuple[Make, Future[Samples]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def ask(self, make: Make) -> Future[Samples]:
        """Have a batch made; it can be cancelled until then."""
        if self._thread is None:
            # A daemon: a read that hangs must not keep the process from its end.
            self._thread = Thread(target=self._make_all, name="batches", daemon=True)
            self._thread.start()
        made = Future[Samples]()
        self._orders.put((make, made))
        return made

    def awaited(self, made: Future[Samples]) -> Samples:
        """Return a batch; HetctlError if it is not made in time, or the error of its function."""
        began = time.perf_counter()
        in_time = wait([made], self._patience_s).done
        self.waited_s += time.perf_counter() - began
        if not in_time:
            raise HetctlError(f"no batch was made in {self._patience_s:g} s", FILE_SYSTEM)
        return made.result()

    def close(self) -> None:
        """Let the thread end after the batch that it is making, which is not awaited."""
        self._orders.put(None)

    def _make_all(self) -> None:
        while (order := self._orders.get()) is not None:
            make, made = order
            if not made.set_running_or_notify_cancel():
                continue
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)
            # A batch would stay in memory until the next one is asked for.
            del order, make, made
