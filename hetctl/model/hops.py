"""Members that hop: workers, visits and plans in events, their status, and files of partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
        """Return in words what another manifest has instead; None if both are equal."""
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


def slots_in(worker: str) -> tuple[str, ...]:
    """Return the name of the worker that each GPU of a worker would be alone."""
    return tuple(worker_named(node_of(worker), (gpu,)) for gpu in gpus_in(worker))


class Unit(NamedTuple):
    """A training unit: one configuration on one partition in one of its epochs."""

    config: str
    epoch: int
    partition: str


@dataclass(frozen=True, slots=True)
class Visit:
    """Training of a unit at a worker.

    Parameters
    ----------
    number : int
        Number of the start, which distinguishes repeated attempts at a unit.
    """

    number: int
    config: str
    epoch: int
    partition: str
    worker: str

    @property
    def unit(self) -> Unit:
        """Unit that is trained."""
        return Unit(self.config, self.epoch, self.partition)


DONE, LOST, UNDONE = "done", "lost", "undone"


@dataclass(frozen=True)
class VisitEnd:
    """Training or evaluation of a member on one partition at one worker.

    Parameters
    ----------
    number : int
        Number of the start in the run.
    epoch : int
        Training epoch, from 1; the evaluation that follows it has the same number.
    worker : str
        Node and GPUs, as `worker_named` names them.
    began_at, ended_at : float
        Seconds since the epoch.
    waited_s, hop_s : float
        Seconds for which it waited for the member's state, and of the transfer of the state between nodes.
    bytes : int
        Bytes that were transferred; 0 within a node.
    loss : float or None
        Mean training loss.
    reason : str
        Reason why it was lost.
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

    @property
    def hopper_epoch(self) -> int:
        """Epoch of the hopper's state machine: from 0, even ones train and odd ones evaluate."""
        return 2 * (self.epoch - 1) + self.evaluates


@dataclass(frozen=True)
class RunVisit(VisitEnd):
    """Visit of a member in a run.

    Parameters
    ----------
    state : str
        ``done``; ``lost`` if it ended without a result; ``undone`` if its result was lost later.
    round : int
        Index of the round of its job.
    """

    member: str = ""
    state: str = DONE
    round: int = 0


@dataclass(frozen=True)
class HopPlanMade:
    """Plan of visits that a driver has made.

    Parameters
    ----------
    predicted_s, lower_bound_s : float
        Predicted time of the planned visits, and its lower bound, in seconds from then.
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
        Shares of the time in visits that are done: in which it worked, and in which it waited for a state.
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
    """Plan of visits, and what came of it.

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
class HopSpan:
    """Visit in seconds from the run's start.

    Parameters
    ----------
    done : bool
        False if it was lost or undone.
    """

    member: str
    worker: str
    epoch: int
    evaluates: bool
    partition: int
    start_s: float
    end_s: float
    done: bool


@dataclass(frozen=True)
class HopStatus:
    """Hops of a run.

    Parameters
    ----------
    visits, lost, undone : int
        Visits of all members by their state.
    members : tuple of HopMember
        Members to be shown.
    spans : tuple of HopSpan
        All visits in the order of their starts, if requested.
    """

    partitions: int
    visits: int
    lost: int
    undone: int
    members: tuple[HopMember, ...]
    workers: tuple[HopWorkerUse, ...]
    plans: tuple[HopForecast, ...]
    spans: tuple[HopSpan, ...] = ()
