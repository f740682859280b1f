"""Messages to a rank, and the address of the driver."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hetctl.cluster.launchers.agents import round_prefix
from hetctl.model.ensemble import Ensemble
from hetctl.model.plan import Allocation
from hetctl.model.run import NONE
from hetctl.model.serialization import decode, encode
from hetctl.model.site import ANY_INTERFACES, USUAL_TIMEOUTS, NetworkInterfaces, Timeouts
from hetctl.runtime.transport import Address
from hetctl.runtime.worker.context import InputShare
from hetctl.runtime.worker.group import RankInfo
from hetctl.storage.atomic_io import write_json

TRAIN, MEASURE, PROBE, ALL_REDUCE = "train", "measure", "probe", "all-reduce"


@dataclass(frozen=True)
class TrainingSpec:
    """Specification of a member's training in a round, for the ranks of its group.

    Parameters
    ----------
    round : int
        Index of the round.
    ensemble : Ensemble
        With this member alone, and the batch size that it is trained with.
    checkpoints : str
        Folder of the member's checkpoints.
    deadline : float
        Seconds since the epoch; an epoch that would end later is not started.
    shares : tuple of Share
        By rank.
    longest_s : float or None
        What a whole job has for training; an epoch that takes longer is trained in parts. None: none is.
    sharing : str
        As in `RunSpec`.
    preprocessors : int
        The most that any member may want of a rank, as far as one knows.
    gpu_type : str or None
        Of the member's GPUs, where the site has several and they are of one.
    network, timeouts
        As the site has them.
    """

    run: str
    round: int
    ensemble: Ensemble
    allocation: Allocation
    checkpoints: str
    deadline: float
    shares: tuple[InputShare, ...]
    longest_s: float | None = None
    sharing: str = NONE
    preprocessors: int = 1
    gpu_type: str | None = None
    network: NetworkInterfaces = ANY_INTERFACES
    timeouts: Timeouts = USUAL_TIMEOUTS


@dataclass(frozen=True)
class TaskMessage:
    """Work that the ranks of one group do together.

    Parameters
    ----------
    kind : str
        `TRAIN`, `MEASURE`, `PROBE` or `ALL_REDUCE`.
    folder : str
        Of the run, or of the profiling job.
    name : str
        Of the member, or of the point; it names event file and log.
    training : TrainingSpec or None
        Of a task of the kind `TRAIN`.
    """

    kind: str
    folder: str
    name: str
    training: TrainingSpec | None = None

    @property
    def events(self) -> Path:
        """Folder of event files."""
        return Path(self.folder) / "events"

    @property
    def round(self) -> int | None:
        """Index of the round that the task belongs to; None where there are no rounds."""
        return self.training.round if self.training else None

    @property
    def step_prefix(self) -> str:
        """Beginning of the names of steps that are started for this task alone."""
        return round_prefix(self.training.round) if self.training else Path(self.folder).name

    @property
    def log(self) -> Path:
        """Log of all ranks."""
        return Path(self.folder) / "logs" / f"{self.name}.log"


@dataclass(frozen=True)
class Assignment:
    """A task for one rank.

    Parameters
    ----------
    launched_at : float
        When it was given out, in seconds since the epoch; the rank may have had to be started first.
    own_step : bool
        Whether the rank is one of a step that was started for this task.
    """

    task: TaskMessage
    place: RankInfo
    launched_at: float
    own_step: bool = False


@dataclass(frozen=True)
class StopMessage:
    """The end of a task for the ranks of its group: they leave with a checkpoint.

    Parameters
    ----------
    key : str
        Of the group, as in its `RankInfo`: the message may come when a rank has gone on to another task.
    """

    key: str
    reason: str


def write_address(path: Path, address: Address) -> None:
    """Write where ranks find the driver, for the owner alone: it holds the key."""
    write_json(path, encode(address))


def read_address(path: Path) -> Address:
    """Read where the driver is."""
    return decode(Address, json.loads(path.read_text(encoding="utf-8")))
