"""Messages to a rank, and the address of the driver."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from hetctl.cluster.launchers.agents import round_prefix
from hetctl.model.ensemble import Ensemble
from hetctl.model.hops import Visit
from hetctl.model.plan import Allocation
from hetctl.model.run import NONE
from hetctl.model.serialization import encode
from hetctl.model.site import ANY_INTERFACES, USUAL_TIMEOUTS, NetworkInterfaces, Timeouts
from hetctl.model.training_settings import BalanceSettings
from hetctl.model.values import dataclass
from hetctl.runtime.data.round_inputs import InputShare
from hetctl.runtime.transport import Address
from hetctl.runtime.worker.group import RankInfo
from hetctl.storage.atomic_io import write_json
from hetctl.storage.lease import LeaseMark
from hetctl.storage.paths import RunFolder

TRAIN, VISIT, STAGE, PROBE, ALL_REDUCE = "train", "visit", "stage", "probe", "all-reduce"
RUN_COMMAND = "run-command"
MEASURE, MEASURE_LAYERS, MEASURE_LINKS = "measure", "measure-layers", "measure-links"
MEASURE_COMMAND = "measure-command"

COMMAND_SIGNALS = (0.4, signal.SIGTERM), (0.55, signal.SIGKILL)
RANK_SIGNALS = (0.6, signal.SIGTERM), (0.85, signal.SIGKILL)
"""Shares of the grace period after which a command or rank that was told to stop, and still runs, gets a
signal. A rank signals its command first; then the driver ends the rank."""


@dataclass(frozen=True)
class TrainingSpec:
    """Specification of a member's training in a round, for the ranks of its group.

    Parameters
    ----------
    run_key : str
        Unique name of the run, from `run_key`.
    round : int
        Index of the round.
    ensemble : Ensemble
        Ensemble of this member alone, with its present batch size.
    checkpoints : str
        Folder of the member's checkpoints.
    deadline : float
        End of training in seconds since the epoch; an epoch that would end later is not started.
    shares : tuple of InputShare
        Shares of the input by rank.
    max_uninterrupted_s : float or None
        Seconds that a whole job has for training; a longer epoch is trained in parts. None: no limit.
    sharing : str
        Sharing of samples, as in `RunSpec`.
    preprocessors : int
        Largest number of preprocessors per rank that any member is known to need.
    gpu_type : str or None
        Type of the member's GPUs if the site has several types and the member uses one; else None.
    balance : BalanceSettings
        Settings of balanced batches; the allocation gives the first batches.
    network, timeouts
        Settings of the site.
    visit : Visit or None
        Visit for the kind `VISIT`; else None.
    grace_s : float
        Seconds from a stop to the end of the job, within which a command slow to stop is killed.
    lease : LeaseMark or None
        Lease of the driver, without which ranks may write nothing; None if it has none.
    fused_rates : mapping of int to float
        Same as in `Progress`, of its shape on this type of GPU.
    """

    run: str
    run_key: str
    round: int
    ensemble: Ensemble
    allocation: Allocation
    checkpoints: str
    deadline: float
    shares: tuple[InputShare, ...]
    max_uninterrupted_s: float | None = None
    sharing: str = NONE
    preprocessors: int = 1
    gpu_type: str | None = None
    balance: BalanceSettings = field(default_factory=BalanceSettings)
    network: NetworkInterfaces = ANY_INTERFACES
    timeouts: Timeouts = USUAL_TIMEOUTS
    visit: Visit | None = None
    grace_s: float = 0.0
    lease: LeaseMark | None = None
    fused_rates: Mapping[int, float] = field(default_factory=dict)

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Node and GPU of each rank."""
        return tuple(f"{part.node}:{gpu}" for part in self.allocation.placement for gpu in part.gpus)


@dataclass(frozen=True)
class TaskMessage:
    """Work for the ranks of one group.

    Parameters
    ----------
    kind : str
        `TRAIN`, `FUSED`, `VISIT`, `STAGE`, `RUN_COMMAND`, `PROBE` or `ALL_REDUCE`, or in profiling
        `MEASURE`, `MEASURE_COMMAND`, `MEASURE_LAYERS` or `MEASURE_LINKS`.
    folder : str
        Folder of the run or of the profiling job.
    name : str
        Name of the member or the point, and of its event file and log.
    training : TrainingSpec or None
        Specification for the kinds `TRAIN`, `FUSED`, `VISIT`, `STAGE` and `RUN_COMMAND`; else None.
    gpu_type : str or None
        Type of the GPUs in profiling, if the site has several types; else None.
    """

    kind: str
    folder: str
    name: str
    training: TrainingSpec | None = None
    gpu_type: str | None = None

    @property
    def spec(self) -> TrainingSpec:
        """Specification of a task that trains."""
        assert self.training is not None
        return self.training

    @property
    def events(self) -> Path:
        """Folder of the event files."""
        return Path(self.folder) / "events"

    @property
    def round(self) -> int | None:
        """Index of the task's round; None if there are no rounds."""
        return self.training.round if self.training else None

    @property
    def step_prefix(self) -> str:
        """Prefix of the names of steps started for this task alone."""
        return round_prefix(self.training.round) if self.training else Path(self.folder).name

    @property
    def balance_log(self) -> Path:
        """Log of the group's batch sizes and of the times behind them."""
        return RunFolder(Path(self.folder)).balance / f"{self.name}.jsonl"

    def wave_log(self, rank: int) -> Path:
        """Return the log of the weight versions that a rank's minibatches used."""
        return RunFolder(Path(self.folder)).waves / f"{self.name}-{rank:03d}.jsonl"

    @property
    def log(self) -> Path:
        """Log file of all ranks."""
        return Path(self.folder) / "logs" / f"{self.name}.log"


@dataclass(frozen=True)
class Assignment:
    """A task for one rank.

    Parameters
    ----------
    launched_at : float
        Time of the assignment in seconds since the epoch; the rank may have been started after it.
    own_step : bool
        True if the rank belongs to a step started for this task.
    """

    task: TaskMessage
    rank_info: RankInfo
    launched_at: float
    own_step: bool = False


def write_address(path: Path, address: Address) -> None:
    """Write the driver's address to a file that only the owner can read: it contains the key."""
    write_json(path, encode(address), secret=True)
