"""How far a member has come: its finished epochs, and how its steps ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EpochResult:
    """What one epoch of a member gave.

    Parameters
    ----------
    epoch : int
        Counted from 1.
    metrics : mapping
        ``loss`` over the training samples and ``val_*`` over the validation samples.
    seconds : float
        Training time of the epoch, evaluation and checkpoint left out.
    rate : float or None
        Samples/s of the group over the full batches behind the first; None: there were too few.
    batch_size : int or None
        Samples per GPU and step.
    gpu_type : str or None
        Of its GPUs, if the site has several types and these were of one.
    overhead_s : float or None
        What passed from the end of the last epoch's training to the end of this one's beyond the samples at
        `rate`; None: the process had trained no epoch before, or not the whole of this one.
    """

    epoch: int
    metrics: Mapping[str, float]
    seconds: float
    gpus: int
    finished_at: float
    rate: float | None = None
    batch_size: int | None = None
    gpu_type: str | None = None
    overhead_s: float | None = None


@dataclass(frozen=True)
class Progress:
    """How far a member has come.

    Parameters
    ----------
    failures : int
        Steps that failed since the last finished epoch.
    part_samples : int
        Samples of the unfinished epoch that the last checkpoint holds.
    node_failures : int
        Steps that ended with one of their nodes.
    batch_size : int or None
        What the member's batch size came down to after it had run out of memory; None: it has not.
    restarts_s : tuple of float
        Seconds to the first step of its newest starts on ranks that had been at work before.
    """

    member: str
    epochs: tuple[EpochResult, ...] = ()
    converged: str | None = None
    failed: str | None = None
    failures: int = 0
    part_samples: int = 0
    node_failures: int = 0
    batch_size: int | None = None
    restarts_s: tuple[float, ...] = ()

    @property
    def active(self) -> bool:
        """Whether the member still needs training."""
        return self.converged is None and self.failed is None
