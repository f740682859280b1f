"""Clock of what a GPU computes in PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hetctl.runtime.frameworks.stage_network import ComputeTime

MS_PER_S = 1000.0
AHEAD = 2.0
"""For how long a GPU spins, in times of the launches that have to be ahead of it."""
LEAST_CYCLES, MOST_CYCLES = 100_000, 200_000_000
"""Limits of that in cycles of the GPU: from 0.05 to 100 ms at 2 GHz."""


@dataclass(frozen=True)
class ComputeSpan:
    """Kernels that were queued one after another.

    Parameters
    ----------
    queued, began, ended : torch.cuda.Event
        Events before the spinning kernel, after it, and after the span.
    launch_s : float
        Seconds in which the host has launched the kernels of the span.
    """

    queued: torch.cuda.Event
    began: torch.cuda.Event
    ended: torch.cuda.Event
    launch_s: float


class ComputeClock:
    """Clock of what a GPU computes, by events in its queue.

    Small kernels take less time than their launches, for which the GPU then waits. Ahead of each span the GPU
    spins, until all kernels of the span are in its queue: the events have the time of the kernels alone.

    Parameters
    ----------
    now : callable
        The host's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._spans: list[ComputeSpan] = []
        self._cycles = LEAST_CYCLES

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is queued meanwhile."""
        queued, began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        queued.record()
        # Not documented, but in PyTorch's own tests since its first years; cycles are those of the GPU.
        torch.cuda._sleep(self._cycles)
        began.record()
        began_s = self._now()
        yield
        launch_s = self._now() - began_s
        ended.record()
        self._spans.append(ComputeSpan(queued, began, ended, launch_s))

    def taken(self) -> ComputeTime:
        """Wait for the GPU; return the time of all spans since the last call."""
        torch.cuda.synchronize()
        spans, self._spans = self._spans, []
        if spans:
            spun_s = spans[-1].queued.elapsed_time(spans[-1].began) / MS_PER_S
            needed_s = AHEAD * max(span.launch_s for span in spans)
            self._cycles = min(max(LEAST_CYCLES, round(self._cycles * needed_s / spun_s)), MOST_CYCLES)
        computed_ms = sum(span.began.elapsed_time(span.ended) for span in spans)
        return ComputeTime(computed_ms / MS_PER_S, sum(span.launch_s for span in spans))
