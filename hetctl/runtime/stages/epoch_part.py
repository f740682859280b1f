"""Part of an epoch that virtual workers train without a pause, and its result on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetctl.runtime.data.sampler import parts_of


@dataclass(frozen=True)
class EpochPart:
    """Samples of an epoch that are trained without a pause.

    Parameters
    ----------
    number : int
        Number of the part since the ranks met.
    epoch : int
        Epoch, counted from 1.
    position : int
        Samples of the epoch that were trained before.
    samples : int
        Samples of the whole epoch.
    chunk : int
        Samples of one minibatch of all virtual workers together.
    first_wave : int
        Waves of the earlier parts.
    """

    number: int
    epoch: int
    position: int
    samples: int
    chunk: int
    first_wave: int

    @property
    def minibatches(self) -> int:
        """Most minibatches of a virtual worker."""
        return -(-(self.samples - self.position) // self.chunk)

    def minibatches_of(self, worker: int, workers: int) -> int:
        """Return the minibatches of a virtual worker: the last chunk may have no samples for it."""
        last = self.samples - self.position - (self.minibatches - 1) * self.chunk
        return self.minibatches - (parts_of(last, (1,) * workers)[worker] == 0)

    def position_after(self, minibatch: int) -> int:
        """Return the samples of the epoch that are trained when all have completed a minibatch."""
        return min(self.samples, self.position + minibatch * self.chunk)


@dataclass
class PassTimes:
    """Time of a stage in a part of an epoch, in seconds.

    Parameters
    ----------
    forward_s, backward_s : float
        Time of the passes, with that of the optimizer.
    wave_wait_s : float
        Time without a pass on a first stage because the next minibatch needs waves of other virtual workers.
    idle_s : float
        Time without a pass for other reasons: the pipeline fills or drains, or another stage is slower.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    wave_wait_s: float = 0.0
    idle_s: float = 0.0


@dataclass
class TrainedPart:
    """Result of a part on one rank.

    Parameters
    ----------
    minibatches : int
        Most minibatches that a virtual worker has completed.
    loss : float
        Sum of the loss over the samples of this virtual worker; on its first stage, else 0.
    samples : int
        Number of these samples.
    """

    minibatches: int
    waves: int
    loss: float = 0.0
    samples: int = 0
    times: PassTimes = field(default_factory=PassTimes)
