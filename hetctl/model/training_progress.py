"""Progress of a member: its finished epochs, the ends of its tasks, and its live metrics in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EpochResult:
    """Result of one epoch of a member.

    Parameters
    ----------
    epoch : int
        Number of the epoch, from 1.
    metrics : mapping
        ``loss`` over the training samples and ``val_*`` over the validation samples.
    duration_s : float
        Training time of the epoch, without evaluation and checkpoint.
    rate : float or None
        Samples/s of the group over the full batches after the first; None: there were too few.
    batch_size : int or None
        Samples per GPU and step.
    gpu_type : str or None
        Type of its GPUs, if the site has several types and these were of one.
    overhead_s : float or None
        Seconds from the end of training of the previous epoch to that of this one, minus those of its samples
        at `rate`; None: the process had trained no epoch before, or trained only part of this one.
    """

    epoch: int
    metrics: Mapping[str, float]
    duration_s: float
    gpus: int
    finished_at: float
    rate: float | None = None
    batch_size: int | None = None
    gpu_type: str | None = None
    overhead_s: float | None = None


@dataclass(frozen=True)
class Progress:
    """Progress of a member.

    Parameters
    ----------
    failures : int
        Tasks that failed since the last finished epoch.
    part_samples : int
        Samples of the unfinished epoch in the last checkpoint.
    node_failures : int
        Number of tasks that ended because one of their nodes failed.
    disk_errors : int
        Number of tasks that ended with a disk error since a checkpoint or an epoch got further than ever.
    batch_size : int or None
        Batch size to which it was reduced after it ran out of memory; None: it was not reduced.
    furthest : int
        Largest number of finished epochs so far, also before a return to an earlier checkpoint.
    asked : int or None
        Epochs in all that a search has asked for; 0 before it begins the trial, None if it is no trial.
    reported : int
        Epochs in all of the last request that the search has got a report of.
    restarts_s : tuple of float
        Seconds to the first step of its newest starts on ranks that had trained before.
    """

    member: str
    epochs: Sequence[EpochResult] = ()
    converged: str | None = None
    failed: str | None = None
    failures: int = 0
    part_samples: int = 0
    node_failures: int = 0
    disk_errors: int = 0
    batch_size: int | None = None
    furthest: int = 0
    asked: int | None = None
    reported: int = 0
    restarts_s: tuple[float, ...] = ()

    @property
    def active(self) -> bool:
        """True if the member still needs training; a trial only while its search waits for it."""
        return self.converged is None and self.failed is None and (self.asked is None or self.is_awaited)

    @property
    def is_awaited(self) -> bool:
        """True if it is a trial that its search has asked for, and has no report of yet."""
        return self.asked is not None and self.asked > self.reported

    @property
    def last_epoch(self) -> int:
        """Number of its last finished epoch; 0 if there is none."""
        return self.epochs[-1].epoch if self.epochs else 0


@dataclass(frozen=True)
class RankShare:
    """Part of a rank in the steps of a balanced group.

    Parameters
    ----------
    worker : str
        Node and number of its GPU or slot, as in ``node1:0``.
    batch : int
        Samples of the rank in a full chunk.
    step_s : float
        Time of its own computing in the last step, without waiting for other ranks.
    """

    worker: str
    batch: int
    step_s: float


@dataclass(frozen=True)
class LiveMetrics:
    """Live metrics of a member in training at one time.

    Parameters
    ----------
    time : float
        Seconds since the epoch.
    epoch : int
        Number of the epoch in training, from 1.
    position, samples : int
        Samples of the epoch that are done, and samples of the whole epoch; 0: not known.
    rate : float
        Samples/s of the whole group since the previous report.
    loss : float or None
        Loss of the last batch; None if ``train_fn`` does not report it.
    gpu_busy_fraction : float or None
        Share of its GPU, or of its cores, that rank 0 used since the previous report.
    ranks : tuple of RankShare
        Parts of all ranks of a group whose times are compared; empty for others.
    """

    time: float
    epoch: int
    position: int
    samples: int
    rate: float
    loss: float | None = None
    gpu_busy_fraction: float | None = None
    ranks: tuple[RankShare, ...] = ()
