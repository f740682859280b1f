"""Wave Synchronous Parallel: which minibatch may start, and with which weights (HetPipe, sections 4 and 5).

Minibatches of a virtual worker count from 1, its waves from 0: wave c is the minibatches c * N_m + 1 to
(c + 1) * N_m. A virtual worker drives its own `WspClock`; the parameter servers hold one `GlobalClock`.
All are values: each step returns the state that follows, so an executor, a simulator and a replay of
their messages decide the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Bounds:
    """How stale weights may be.

    Parameters
    ----------
    in_flight : int
        Minibatches of a virtual worker that are processed at the same time, N_m; also those of a wave.
    distance : int
        By how many clocks a virtual worker may be ahead of the slowest one, D.
    """

    in_flight: int
    distance: int = 0

    def __post_init__(self) -> None:
        if self.in_flight < 1 or self.distance < 0:
            raise ValueError(f"no bounds: {self.in_flight} in flight, clock distance {self.distance}")

    @property
    def local_staleness(self) -> int:
        """The most recent updates of its own that a minibatch may miss, s_local."""
        return self.in_flight - 1

    @property
    def global_staleness(self) -> int:
        """The most recent updates of each other virtual worker that a minibatch may miss, s_global."""
        return (self.distance + 1) * self.in_flight + self.local_staleness - 1

    def wave_of(self, minibatch: int) -> int:
        """Return the wave that a minibatch belongs to."""
        return (minibatch - 1) // self.in_flight

    def waves_needed(self, minibatch: int) -> int:
        """Return how many waves of all virtual workers must be in the weights that a minibatch uses.

        The least whole number of waves that holds every minibatch up to `minibatch` - (s_global + 1).
        """
        return max(0, minibatch // self.in_flight - 1 - self.distance)


@dataclass(frozen=True)
class Version:
    """What is in the weights: all updates of its own up to one, and so many waves of everybody's."""

    minibatch: int
    waves: int


@dataclass(frozen=True)
class WspClock:
    """A virtual worker's progress.

    Parameters
    ----------
    started, completed : int
        Minibatches; they start and complete in order.
    pulled : int
        Waves of all virtual workers that are in its weights, the last c_global that it saw.
    """

    bounds: Bounds
    started: int = 0
    completed: int = 0
    pulled: int = 0

    @property
    def waves(self) -> int:
        """Waves that are complete: each is pushed to the parameter servers when it is."""
        return self.completed // self.bounds.in_flight

    @property
    def now(self) -> int:
        """The local clock c_local: a wave that is complete counts when the next may go on."""
        return min(self.waves, self.pulled + self.bounds.distance)

    @property
    def waves_wanted(self) -> int:
        """Waves of all virtual workers without which it will have to stop.

        At the end of clock c these are the waves 0 to c - D. Until they are pulled all minibatches of
        the next wave but its last may start.
        """
        return max(0, self.waves - self.bounds.distance)

    @property
    def must_pull(self) -> bool:
        """Whether it is to ask for weights, as soon as `waves_wanted` are in the global ones."""
        return self.pulled < self.waves_wanted

    @property
    def may_start(self) -> bool:
        """Whether the next minibatch may start within both bounds."""
        minibatch = self.started + 1
        room = minibatch - self.completed <= self.bounds.in_flight
        return room and self.pulled >= self.bounds.waves_needed(minibatch)

    @property
    def version(self) -> Version:
        """The weights of a minibatch that starts now; they are kept until its backward pass."""
        return Version(self.completed, self.pulled)

    def start(self) -> WspClock:
        """Start the next minibatch.

        Raises
        ------
        ValueError
            If it may not.
        """
        if not self.may_start:
            raise ValueError(f"minibatch {self.started + 1} may not start: {self}")
        return replace(self, started=self.started + 1)

    def complete(self) -> WspClock:
        """Complete the oldest minibatch in flight: its update is in the local weights.

        If `waves` grows by that, the updates of the wave are to be pushed, as one.

        Raises
        ------
        ValueError
            If there is none.
        """
        if self.completed == self.started:
            raise ValueError(f"no minibatch is in flight: {self}")
        return replace(self, completed=self.completed + 1)

    def pull(self, waves: int) -> WspClock:
        """Take over global weights with so many waves in them; older ones than it has change nothing."""
        return replace(self, pulled=max(self.pulled, waves))


@dataclass(frozen=True)
class GlobalClock:
    """What the parameter servers know.

    Parameters
    ----------
    pushed : tuple of int
        Waves by virtual worker.
    """

    pushed: tuple[int, ...]

    @property
    def now(self) -> int:
        """The global clock c_global: so many waves of every virtual worker are in the global weights."""
        return min(self.pushed)

    def push(self, worker: int, wave: int) -> GlobalClock:
        """Add the updates of a wave; one that was pushed before changes nothing.

        Raises
        ------
        ValueError
            If waves before it are missing.
        """
        if wave > self.pushed[worker]:
            raise ValueError(f"virtual worker {worker} pushes wave {wave} after {self.pushed[worker]} waves")
        waves = max(self.pushed[worker], wave + 1)
        return GlobalClock((*self.pushed[:worker], waves, *self.pushed[worker + 1 :]))
