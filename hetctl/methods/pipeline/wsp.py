"""Wave Synchronous Parallel: start conditions and weights of minibatches (HetPipe, sections 4 and 5).

Minibatches of a virtual worker count from 1, its waves from 0: wave c is the minibatches c * N_m + 1 to
(c + 1) * N_m. Each virtual worker has its own `WspClock`; the parameter servers hold one `GlobalClock`.
Both are immutable: each step returns the next state, so that an executor, a simulator and a replay of
their messages make the same decisions. The log of a run is checked against the same `Bounds`.
`StageQueue` orders the passes of a stage by minibatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Generic, TypeVar

from hetctl.model.pipelines import WaveRecord
from hetctl.model.values import dataclass


@dataclass(frozen=True)
class Bounds:
    """Bounds of the staleness of weights.

    Parameters
    ----------
    in_flight : int
        Minibatches of a virtual worker that are processed concurrently, N_m; also the size of a wave.
    distance : int
        Most clocks by which a virtual worker may be ahead of the slowest one, D.
    """

    in_flight: int
    distance: int = 0

    def __post_init__(self) -> None:
        if self.in_flight < 1 or self.distance < 0:
            raise ValueError(f"no bounds: {self.in_flight} in flight, clock distance {self.distance}")

    @property
    def local_staleness(self) -> int:
        """Most recent updates of its own virtual worker that a minibatch may miss, s_local."""
        return self.in_flight - 1

    @property
    def global_staleness(self) -> int:
        """Most recent updates of each other virtual worker that a minibatch may miss, s_global."""
        return (self.distance + 1) * self.in_flight + self.local_staleness - 1

    def waves_needed(self, minibatch: int) -> int:
        """Return the number of waves of all virtual workers that a minibatch's weights must include.

        By the start condition of section 5, it is the least number of waves that contains every minibatch
        up to `minibatch` - (s_global + 1).
        """
        return max(0, minibatch // self.in_flight - 1 - self.distance)


@dataclass(frozen=True)
class WspClock:
    """Progress of a virtual worker.

    Parameters
    ----------
    started, completed : int
        Numbers of minibatches, which start and complete in order.
    pulled : int
        Waves of all virtual workers in its weights, the last known c_global.
    """

    bounds: Bounds
    started: int = 0
    completed: int = 0
    pulled: int = 0

    @property
    def waves(self) -> int:
        """Number of complete waves; each is pushed to the parameter servers on completion."""
        return self.completed // self.bounds.in_flight

    @property
    def waves_wanted(self) -> int:
        """Number of waves of all virtual workers without which this one will have to stop.

        At the end of clock c these are the waves 0 to c - D. Until they are pulled, all minibatches of the
        next wave except its last may start.
        """
        return max(0, self.waves - self.bounds.distance)

    @property
    def must_pull(self) -> bool:
        """True if weights are to be requested, as soon as the global ones include `waves_wanted` waves."""
        return self.pulled < self.waves_wanted

    @property
    def may_start(self) -> bool:
        """True if the next minibatch may start within both bounds."""
        minibatch = self.started + 1
        has_room = minibatch - self.completed <= self.bounds.in_flight
        return has_room and self.pulled >= self.bounds.waves_needed(minibatch)

    def start(self) -> WspClock:
        """Start the next minibatch.

        Raises
        ------
        ValueError
            If the minibatch may not start.
        """
        if not self.may_start:
            raise ValueError(f"minibatch {self.started + 1} may not start: {self}")
        return replace(self, started=self.started + 1)

    def complete(self) -> WspClock:
        """Complete the oldest minibatch in flight: its update is added to the local weights.

        If this increases `waves`, the updates of the wave are to be pushed together.

        Raises
        ------
        ValueError
            If no minibatch is in flight.
        """
        if self.completed == self.started:
            raise ValueError(f"no minibatch is in flight: {self}")
        return replace(self, completed=self.completed + 1)

    def pull(self, waves: int) -> WspClock:
        """Adopt global weights with `waves` waves; weights older than the present ones change nothing."""
        # Answers of the servers may overtake one another.
        return replace(self, pulled=max(self.pulled, waves))


@dataclass(frozen=True)
class GlobalClock:
    """Progress of all virtual workers, as known to the parameter servers.

    Parameters
    ----------
    pushed : tuple of int
        Number of waves pushed by each virtual worker.
    """

    pushed: tuple[int, ...]

    @property
    def now(self) -> int:
        """Global clock c_global: the number of waves of every virtual worker in the global weights."""
        return min(self.pushed)

    def push(self, worker: int, wave: int) -> GlobalClock:
        """Add the updates of a wave; a wave that was already pushed changes nothing.

        Raises
        ------
        ValueError
            If earlier waves are missing.
        """
        if wave > self.pushed[worker]:
            raise ValueError(f"virtual worker {worker} pushes wave {wave} after {self.pushed[worker]} waves")
        waves = max(self.pushed[worker], wave + 1)
        return GlobalClock((*self.pushed[:worker], waves, *self.pushed[worker + 1 :]))


def staleness(records: Iterable[WaveRecord], bounds: Bounds) -> tuple[int, int]:
    """Return the most updates that a minibatch missed of its own virtual worker, and may miss of another."""
    local = overall = 0
    for record in records:
        for minibatch, completed, pulled in record.minibatches:
            local = max(local, minibatch - 1 - completed)
            overall = max(overall, minibatch - 1 - pulled * bounds.in_flight)
    return local, overall


def violations(records: Iterable[WaveRecord], bounds: Bounds) -> list[str]:
    """Return the minibatches that met older weights than s_local and s_global allow, one line for each."""
    found = []
    for record in records:
        for minibatch, completed, pulled in record.minibatches:
            place = f"epoch {record.epoch}, virtual worker {record.worker}, stage {record.stage}"
            if minibatch - 1 - completed > bounds.local_staleness:
                found.append(f"{place}: minibatch {minibatch} has only {completed} updates of its own")
            if pulled < bounds.waves_needed(minibatch):
                found.append(f"{place}: minibatch {minibatch} has only {pulled} waves of all")
    return found


T = TypeVar("T")


class StageQueue(Generic[T]):
    """Passes that are ready at a stage, in the order in which they became ready.

    Forward passes start in the order of the minibatches, and so do backward passes, as they become ready in
    that order; of both the one that was ready first starts. A forward pass waits for memory, and backward
    passes, which release it, may overtake.

    Parameters
    ----------
    capacity : int
        Minibatches that the stage can hold between their forward and backward passes.
    """

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._ready: deque[tuple[bool, T]] = deque()

    def add(self, item: T, *, backward: bool) -> None:
        """Add a pass that is ready now."""
        self._ready.append((backward, item))

    def take(self, may_start: Callable[[T], bool] = lambda _: True) -> tuple[bool, T] | None:
        """Return the pass to start now, and whether it is a backward pass; None if none may start.

        Parameters
        ----------
        may_start : callable
            Function that returns false for a forward pass that still waits for weights; it holds up those
            after it.
        """
        forward_waits = False
        for at, (backward, item) in enumerate(self._ready):
            if backward or not (forward_waits or (forward_waits := not (self._free and may_start(item)))):
                del self._ready[at]
                self._free -= not backward
                return backward, item
        return None

    def release(self) -> None:
        """Record that the stage holds one minibatch less."""
        self._free += 1
