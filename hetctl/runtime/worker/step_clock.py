"""Clocks of training steps: for the steady rate, for an epoch's rate, and for a rank's own part of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from hetctl.perf.rate_prediction import is_noteworthy
from hetctl.perf.step_times import WANTED_ERROR, WANTED_IN_TRAINING, StepTimes, is_known, step_times

RUN_S = 0.1
"""Shortest timed run of steps in seconds: waiting for each step would slow a GPU down."""
RATE_EVERY_S = 60.0
"""Seconds from one measurement of the rate in training to the next."""


def wait_for_device(loss: Any) -> None:
    """Wait until the step of this loss is done; frameworks queue steps ahead of a GPU."""
    with suppress(TypeError, ValueError):
        float(loss)


class SteadyClock:
    """Clock that times runs of full batches until their rate is known.

    Parameters
    ----------
    clock : callable
        Clock that returns seconds.
    wanted_error : float
        Error of the rate, relative to it, that is accurate enough.

    Attributes
    ----------
    first_step_s : float or None
        Seconds from the clock's start to the end of the first step, which compiles and allocates.
    steps : int
        Number of timed steps after the first.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, wanted_error: float = WANTED_ERROR
    ) -> None:
        self._clock, self._wanted_error = clock, wanted_error
        self._run_began = clock()
        self._run_steps = 0
        self._runs: list[float] = []
        self._timed_s = 0.0
        self.first_step_s: float | None = None
        self.steps = 0
        self.done = False

    def note(self, loss: Any) -> None:
        """Record the end of a step."""
        if self.first_step_s is None:
            wait_for_device(loss)
            self.first_step_s = self._clock() - self._run_began
            self._run_began = self._clock()
            return
        self.steps += 1
        self._run_steps += 1
        if self._clock() - self._run_began >= RUN_S:
            wait_for_device(loss)
            seconds = self._clock() - self._run_began
            self._runs.append(seconds / self._run_steps)
            self._timed_s += seconds
            self.done = is_known(self._runs, self._timed_s, self._wanted_error)
            self._run_steps = 0
            self._run_began = self._clock()

    def restart(self, loss: Any) -> None:
        """Drop the run that has begun: there was more to do than steps; the next one begins now."""
        wait_for_device(loss)
        self._run_steps = 0
        self._run_began = self._clock()

    def result(self) -> StepTimes:
        """Return the times of steps; at least one after the first must have been recorded."""
        return step_times(self._runs)


class RateClock:
    """Rate of a group in training, known as soon as enough full batches are timed, and again if it changes.

    Between two measurements nothing is timed, and the device is not waited for.

    Parameters
    ----------
    chunk : int
        Samples of a full batch of the whole group.
    clock : callable
        Clock that returns seconds.
    """

    def __init__(self, chunk: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._chunk, self._clock = chunk, clock
        self._position = 0
        self._rate: float | None = None
        self._next_s = 0.0
        self._steady: SteadyClock | None = SteadyClock(clock, WANTED_IN_TRAINING)

    def note(self, position: int, loss: Any) -> tuple[float, float] | None:
        """Record that `position` samples of an epoch are done; return a new rate in samples/s and its error.

        The error is the half-width of the rate's 95 % confidence interval, relative to it.
        """
        is_full_batch, self._position = position - self._position == self._chunk, position
        if self._steady is None:
            if self._clock() < self._next_s:
                return None
            self._steady = SteadyClock(self._clock, WANTED_IN_TRAINING)
        if not is_full_batch:
            # It is the last one of an epoch, or the first after an evaluation or a checkpoint.
            self._steady.restart(loss)
            return None
        self._steady.note(loss)
        if not self._steady.done:
            return None
        times, before = self._steady.result(), self._rate
        self._steady, self._next_s = None, self._clock() + RATE_EVERY_S
        rate = self._chunk / times.mean_s
        if before is not None and not is_noteworthy(before, rate):
            return None
        self._rate = rate
        return rate, times.error

    def interrupt(self) -> None:
        """Record that the next step is not timed: it begins with other work."""
        self._position = -1


class StepTimer(Protocol):
    """Timer of a rank's own part of each step: from the request of its batch to the averaging of gradients.

    Waiting for samples counts, as it delays the group, too; waiting for other ranks does not.
    """

    def begin(self, step: int) -> None:
        """Start the time of a step."""

    def taken(self) -> list[tuple[int, float]]:
        """Return the steps whose times became known since the last call: number and seconds.

        It never waits for a device, so a step may come in a later call, or never if it averaged nothing.
        """


class HostStepTimer:
    """Timer of steps that are computed when the framework's functions return."""

    def __init__(self) -> None:
        self._step = 0
        self._began = 0.0
        self._taken: list[tuple[int, float]] = []

    def begin(self, step: int) -> None:
        """Start the time of a step."""
        self._step, self._began = step, time.perf_counter()

    def end(self) -> None:
        """End the time of the step; if called again, as by a further backward pass, the last call counts."""
        self._taken = [(self._step, time.perf_counter() - self._began)]

    def taken(self) -> list[tuple[int, float]]:
        """Return the last step, once."""
        taken, self._taken = self._taken, []
        return taken


class EpochClock:
    """Rate at which a group trains the full batches of an epoch.

    The first step and the smaller last batch do not count: their extra time belongs to the epoch's overhead.

    Parameters
    ----------
    samples : int
        Samples of the epoch.
    chunk : int
        Samples of a full batch of the whole group.
    clock : callable
        Clock that returns seconds.
    """

    def __init__(self, samples: int, chunk: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._samples = samples
        self._chunk = chunk
        self._began: tuple[float, int] | None = None
        self._ended: tuple[float, int] | None = None

    def note(self, position: int, loss: Any) -> None:
        """Record that `position` samples of the epoch are done."""
        is_last = self._samples - self._chunk < position <= self._samples
        if self._began is not None and not is_last:
            return
        # Only twice in an epoch: each wait leaves the GPU without queued work.
        if self._ended is None:
            wait_for_device(loss)
        mark = self._clock(), position
        if self._began is None:
            self._began = mark
        elif self._ended is None:
            self._ended = mark

    @property
    def rate(self) -> float | None:
        """Rate in samples/s; None if there was no full batch between the first and the last."""
        if self._began is None or self._ended is None:
            return None
        (began, start), (ended, stop) = self._began, self._ended
        return (stop - start) / (ended - began) if stop - start >= self._chunk else None
