"""Live metrics of a member, sent every few seconds by a thread of its own, without delay of training."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hetctl.model.training_progress import LiveMetrics, RankShare
from hetctl.runtime.agent.gpus import gpus_of_node, utilization, visible_gpus

EVERY_S = 2.0

Send = Callable[[LiveMetrics], None]
Busy = Callable[[], float | None]
"""Function that returns the used share (0 to 1) of a process's device since its last call; None: unknown."""


@contextlib.contextmanager
def live_metrics_to(
    send: Send,
    samples: int,
    busy: Busy,
    shares: Callable[[], tuple[RankShare, ...]] = tuple,
    every_s: float = EVERY_S,
) -> Iterator[Callable[[int, int, Any], None]]:
    """Yield a function to call after each step: with the epoch, its samples that are done, and the loss.

    Parameters
    ----------
    send : callable
        Function that sends live metrics; a closed connection is ignored here.
    samples : int
        Samples of an epoch; 0: not known.
    shares : callable
        Function that returns the parts of the group's ranks in the last step.
    every_s : float
        Seconds between two reports.
    """
    sender = _Sender(send, samples, busy, shares, every_s)
    over = threading.Event()
    thread = threading.Thread(target=sender.run, args=(over,), name="live-metrics", daemon=True)
    thread.start()
    try:
        yield sender.note
    finally:
        over.set()
        thread.join()


class _Sender:
    def __init__(
        self,
        send: Send,
        samples: int,
        busy: Busy,
        shares: Callable[[], tuple[RankShare, ...]],
        every_s: float,
    ) -> None:
        self._send = send
        self._samples = samples
        self._busy = busy
        self._shares = shares
        self._every_s = every_s
        self._seen: tuple[int, int, Any] | None = None

    def note(self, epoch: int, position: int, loss: Any) -> None:
        # One assignment of one tuple: the other thread never sees half of an update.
        self._seen = (epoch, position, loss)

    def run(self, over: threading.Event) -> None:
        last_at, last = time.time(), (0, 0)
        while not over.wait(self._every_s):
            if self._seen is None:
                continue
            (epoch, position, loss), now = self._seen, time.time()
            # Without the samples of an epoch, those of its end are not known.
            if last[0] and (self._samples or epoch == last[0]):
                done = (epoch - last[0]) * self._samples + position - last[1]
                rate = max(0.0, done / (now - last_at))
                # Reading the loss waits for the GPU: in this thread, and not in that of training.
                metrics = LiveMetrics(
                    *(now, epoch, position, self._samples, rate, _number(loss), self._busy()),
                    ranks=self._shares(),
                )
                with contextlib.suppress(ConnectionError):
                    self._send(metrics)
            last_at, last = now, (epoch, position)


def busy_share(device: int | None, cpu_seconds: Callable[[], float] = time.process_time) -> Busy:
    """Return a function for the used share of a rank's GPU, or of its cores if it has none.

    Parameters
    ----------
    cpu_seconds : callable
        Function that returns the CPU time that training has used, in seconds.
    """
    return cores_used(cpu_seconds) if device is None else gpu_used(device)


def cores_used(cpu_seconds: Callable[[], float] = time.process_time) -> Busy:
    """Return a function that gives the share of the rank's cores that was used since the last call."""
    last = [time.monotonic(), cpu_seconds()]

    def share() -> float:
        wall, cpu = time.monotonic(), cpu_seconds()
        used = (cpu - last[1]) / max(wall - last[0], 1e-9) / len(os.sched_getaffinity(0))
        last[:] = [wall, cpu]
        # A process that has ended takes its time with it.
        return min(1.0, max(0.0, used))

    return share


def gpu_used(device: int) -> Busy:
    """Return a function that returns the recent share of time in which a GPU was in use.

    Parameters
    ----------
    device : int
        Index of the GPU among those that this process sees.
    """
    gpu = next(iter(visible_gpus(gpus_of_node(), os.environ)[device:]), None)
    return lambda: None if gpu is None else utilization(gpu)


def _number(loss: Any) -> float | None:
    if loss is None:
        return None
    try:
        value = float(loss)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
