"""Live metrics of a member in training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heartbeat:
    """One look at a member in training.

    Parameters
    ----------
    time : float
        Seconds since the epoch.
    epoch : int
        The one in training, counted from 1.
    position, samples : int
        Samples of the epoch that are done, and all of them.
    rate : float
        Samples/s of the whole group since the last look.
    loss : float or None
        Of the last batch; None if ``train_fn`` does not tell.
    busy : float or None
        Share of its GPU, or of its cores, that rank 0 used since the last look.
    """

    time: float
    epoch: int
    position: int
    samples: int
    rate: float
    loss: float | None = None
    busy: float | None = None
