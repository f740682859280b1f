"""Live metrics of a member in training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heartbeat:
    """Live metrics of a member in training at one time.

    Parameters
    ----------
    time : float
        Seconds since the epoch.
    epoch : int
        Number of the epoch in training, from 1.
    position, samples : int
        Samples of the epoch that are done, and samples of the whole epoch.
    rate : float
        Samples/s of the whole group since the previous heartbeat.
    loss : float or None
        Loss of the last batch; None if ``train_fn`` does not report it.
    busy : float or None
        Share of its GPU, or of its cores, that rank 0 used since the previous heartbeat.
    """

    time: float
    epoch: int
    position: int
    samples: int
    rate: float
    loss: float | None = None
    busy: float | None = None
