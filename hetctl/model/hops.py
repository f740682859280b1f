"""Members that hop: workers, visits and plans in events, their status, and files of partitions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, NamedTuple

from hetctl.model.training_progress import NO_BEST, BestCheckpoint, EpochResult
from hetctl.model.values import dataclass

MANIFEST_FILE = "partitions.json"
PARTITION_FILE = "{partition}.npz"
"""Name of a partition, with its number from 0; it lies beside the manifest."""


@dataclass(frozen=True)
class PartitionFile:
    """One partition, as a file.

    Parameters
    ----------
    samples, validation_samples : int
        Number of its training and validation samples.
    bytes : int
        Length of the file.
    sha256 : str
        Digest of the file's content, in hexadecimal digits.
    """

    samples: int
    validation_samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class PartitionManifest:
    """All partitions of the same data; the position of a partition is its number.

    Parameters
    ----------
    seed : int
        Seed of the random order in which the samples were divided.
    """

    seed: int
    partitions: tuple[PartitionFile, ...]

    @property
    def samples(self) -> int:
        """Training samples of all partitions."""
        return sum(partition.samples for partition in self.partitions)

    @property
    def validation_samples(self) -> int:
        """Validation samples of all partitions."""
        return sum(partition.validation_samples for partition in self.partitions)

    def difference(self, other: PartitionManifest) -> str | None:
        """Return in words how another manifest differs; None if both are equal."""
        if len(other.partitions) != len(self.partitions):
            return f"{len(other.partitions)} partitions, not {len(self.partitions)}"
        if other.seed != self.seed:
            return f"partitions of seed {other.seed}, not {self.seed}"
        return None if other == self else "partitions of other data than input_fn returns now"


def worker_named(node: str, gpus: Iterable[int]) -> str:
    """Return the name of the worker of some GPUs of a node: ``node:gpu``, or ``node:gpu+gpu`` for a group."""
    return f"{node}:{'+'.join(map(str, gpus))}"


def node_of(worker: str) -> str:
    """Return the node of a worker."""
    return worker.rpartition(":")[0]


def gpus_in(worker: str) -> tuple[int, ...]:
    """Return the GPUs of a worker by number; rank 0 of a group is on the first."""
    return tuple(map(int, worker.rpartition(":")[2].split("+")))


def numbers_by_value(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which `node-10` comes after `node-9`."""
    # Pairs, since numbers and texts cannot be compared; every second part is a number.
    parts = enumerate(re.split("([0-9]+)", name))
    return [(int(part), "") if at % 2 else (-1, part) for at, part in parts]


def slots_in(worker: str) -> tuple[str, ...]:
    """Return the names of the workers that its GPUs would be alone."""
    return tuple(worker_named(node_of(worker), (gpu,)) for gpu in gpus_in(worker))


class Unit(NamedTuple):
    """A training unit: one configuration on one partition in one of its epochs."""

    config: str
    epoch: int
    partition: str


@dataclass(frozen=True, slots=True)
class Visit:
    """Training or evaluation of a unit at a worker: an order of the scheduler to a group of ranks.

    In a run, the training visits of epoch e, counted from 1, are epoch 2(e - 1) here, and the evaluation
    visits that follow them epoch 2(e - 1) + 1.

    Parameters
    ----------
    number : int
        Number of the start; it distinguishes repeated attempts at a unit.
    state : str or None
        Name of the file in the node's store from which the visit starts; it may not have arrived yet. None:
        the newest checkpoint, or a fresh network.
    checkpoint : int or None
        Number of the newest visit in that checkpoint, -1 if no visit is in it; None: any. A node that was
        given up may have written a later checkpoint, with visits that were undone.
    """

    number: int
    config: str
    epoch: int
    partition: str
    worker: str
    state: str | None = field(default=None, compare=False)
    checkpoint: int | None = field(default=None, compare=False)

    @property
    def unit(self) -> Unit:
        """Unit that is trained."""
        return Unit(self.config, self.epoch, self.partition)

    @property
    def new_state(self) -> str:
        """Name of the member's state after it."""
        return f"{self.config}-{self.number}"

    @property
    def evaluates(self) -> bool:
        """True if it trains nothing, and evaluates the member on the partition's validation samples."""
        return self.epoch % 2 == 1

    @property
    def training_epoch(self) -> int:
        """Epoch of the member, from 1."""
        return self.epoch // 2 + 1

    @property
    def partition_number(self) -> int:
        """Number of the partition, in a run."""
        return int(self.partition.removeprefix("p"))

    def ended(self, began_at: float, ended_at: float, **measured: Any) -> VisitEnd:
        """Return the record of its end, with fields of `VisitEnd` that were measured."""
        return VisitEnd(
            member=self.config,
            number=self.number,
            epoch=self.training_epoch,
            evaluates=self.evaluates,
            partition=self.partition_number,
            worker=self.worker,
            began_at=began_at,
            ended_at=ended_at,
            **measured,
        )


DONE, LOST, UNDONE = "done", "lost", "undone"


@dataclass(frozen=True)
class VisitEnd:
    """End of a visit, from the rank that reports it to the page that shows it.

    Parameters
    ----------
    number : int
        Number of the start in the run.
    epoch : int
        Training epoch, from 1; the evaluation that follows it has the same number.
    worker : str
        Node and GPUs, as `worker_named` names them.
    began_at, ended_at : float
        Arrival of the assignment, and end, in seconds since the epoch.
    waited_s, hop_s : float
        Seconds of waiting for the member's state, and of its transfer between nodes.
    bytes : int
        Bytes that were transferred; 0 within a node.
    samples : int
        Samples trained or evaluated.
    loss : float or None
        Mean training loss; None for an evaluation.
    reason : str
        Reason why it was lost.
    meet_s, restore_s, train_s, save_s : float
        Seconds of connecting the ranks of a group, of building and restoring the network, of training or
        evaluating, and of writing the new state.
    member : str
        Member; the events about its visits are in its own file.
    state : str
        ``done``; ``lost`` if it ended without a result; ``undone`` if its result was lost later.
    round : int
        Index of the round of its job.
    result : EpochResult or None
        Epoch that this visit finished, in the report of the rank.
    """

    number: int
    epoch: int
    evaluates: bool
    partition: int
    worker: str
    began_at: float
    ended_at: float
    waited_s: float = 0.0
    hop_s: float = 0.0
    bytes: int = 0
    samples: int = 0
    loss: float | None = None
    reason: str = ""
    meet_s: float = 0.0
    restore_s: float = 0.0
    train_s: float = 0.0
    save_s: float = 0.0
    member: str = ""
    state: str = DONE
    round: int = 0
    result: EpochResult | None = None

    @property
    def hopper_epoch(self) -> int:
        """Epoch as in `Visit`: from 0; even ones train, odd ones evaluate."""
        return 2 * (self.epoch - 1) + self.evaluates


@dataclass(frozen=True)
class StateSaved:
    """Checkpoint of the state after a visit, complete on the disk.

    Parameters
    ----------
    number : int
        Number of the visit.
    epoch : int
        Number of finished epochs.
    part_samples : int
        Trained samples of the unfinished epoch.
    duration_s : float
        Time of writing.
    best : BestCheckpoint
        Best epoch so far whose checkpoint is kept.
    damaged : tuple of str
        Names of checkpoints of best epochs that were found to be damaged.
    """

    member: str
    number: int
    epoch: int
    part_samples: int
    path: str
    bytes: int
    sha256: str
    duration_s: float
    best: BestCheckpoint = NO_BEST
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True)
class StateFetched:
    """End of copying a state from another node's store.

    Parameters
    ----------
    error : str
        Reason why the state is not there; empty if it is.
    """

    node: str
    state: str
    bytes: int = 0
    duration_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class StoreOpened:
    """Opening of a node's store of states by its agent.

    Parameters
    ----------
    partitions : frozenset of int
        Numbers of the partitions that exist on the node.
    """

    node: str
    partitions: frozenset[int]


@dataclass(frozen=True)
class StoreLost:
    """Loss of a node's store with its agent; the next agent opens an empty one."""

    node: str


@dataclass(frozen=True)
class RankEnded:
    """End of the rank on a GPU, named as a worker; its unwritten checkpoints are lost."""

    worker: str


@dataclass(frozen=True)
class HopPlanMade:
    """Plan of visits that a driver has made.

    Parameters
    ----------
    predicted_s, lower_bound_s : float
        Predicted time of the planned visits, and its lower bound, in seconds from the plan.
    workers : mapping of str to tuple of str
        Partitions by worker.
    reason : str
        Change that required it.
    """

    scheduler: str
    predicted_s: float
    lower_bound_s: float
    workers: Mapping[str, tuple[str, ...]]
    reason: str


@dataclass(frozen=True)
class RunHopPlan(HopPlanMade):
    """Plan of visits in a run, made at `time` in seconds since the epoch."""

    time: float = 0.0
    round: int = 0


@dataclass(frozen=True)
class HopMember:
    """Position of a member that hops.

    Parameters
    ----------
    epoch : int
        Present epoch, from 1.
    evaluating : bool
        True if all training visits of that epoch are done.
    visited : int
        Partitions visited so far in the present pass of training or evaluation visits.
    worker : str or None
        Worker of its present visit, or of the last one; None before the first.
    visits, repeated : int
        Visits that are done, and those that were lost or undone.
    ended : bool
        True if it needs no more training.
    """

    member: str
    epoch: int
    evaluating: bool
    visited: int
    partitions: int
    worker: str | None
    visits: int
    repeated: int
    ended: bool = False


@dataclass(frozen=True)
class HopWorkerUse:
    """Use of a worker, a GPU, while jobs had visits to make.

    Parameters
    ----------
    visits, repeated : int
        Visits that are done, and those that were lost or undone.
    gpu_busy_fraction, waiting_fraction : float
        Shares of the time in which it worked, and waited for a state, in visits that are done.
    hop_s : float or None
        Mean time of a transfer from another node in seconds; None if there was none.
    """

    worker: str
    visits: int
    repeated: int
    gpu_busy_fraction: float
    waiting_fraction: float
    hop_s: float | None


@dataclass(frozen=True)
class HopForecast:
    """Plan of visits, and its measured outcome.

    Parameters
    ----------
    start_s : float
        Time of the plan in seconds from the run's start.
    reason : str
        Change that required it.
    predicted_s, lower_bound_s : float
        Predicted time of the planned visits and its lower bound, in seconds from the plan.
    measured_s : float or None
        Seconds from the plan to the end of its job's last visit so far; None if none has ended since.
    """

    start_s: float
    scheduler: str
    reason: str
    workers: int
    predicted_s: float
    lower_bound_s: float
    measured_s: float | None


@dataclass(frozen=True)
class HopStatus:
    """Hops of a run.

    Parameters
    ----------
    visits, lost, undone : int
        Visits of all members by their state.
    members : tuple of HopMember
        Members to be shown.
    spans : tuple of VisitEnd
        All visits in the order of their starts, if requested, with times from the run's start.
    """

    partitions: int
    visits: int
    lost: int
    undone: int
    members: tuple[HopMember, ...]
    workers: tuple[HopWorkerUse, ...]
    plans: tuple[HopForecast, ...]
    spans: tuple[VisitEnd, ...] = ()
