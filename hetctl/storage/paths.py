"""Layout of ``$HETCTL_HOME``: the only module that defines file names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetctl.model.values import dataclass
from hetctl.storage.atomic_io import make_private_folder


class Below:
    """Path below an object's `path`; its name may have fields of the object in braces."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, _kind: type) -> Path:
        """Return the path of an object's file or folder."""
        below: Path = owner.path / self._name.format_map(vars(owner))
        return below


@dataclass(frozen=True)
class AgentFiles:
    """Files that a driver shares with the agents of its job.

    Parameters
    ----------
    address : Path
        Address of the driver and its key; the file exists while the driver runs.
    log : Path
        Output of the agents and their launcher, and of ranks between two members.
    """

    address: Path
    log: Path

    @classmethod
    def within(cls, folder: Path) -> AgentFiles:
        """Return the files of a job that has a folder of its own."""
        return cls(folder / "driver.json", folder / "logs" / "agents.log")


@dataclass(frozen=True)
class JobFiles:
    """``runs/<run>/job-0000.*``: the files of one job of a run."""

    path: Path
    number: int

    script = Below("job-{number:04d}.sh")
    """The batch script."""

    @property
    def of_next(self) -> JobFiles:
        """Files of the next job of the run; its script exists as soon as it may have been submitted."""
        return JobFiles(self.path, self.number + 1)

    log = Below("job-{number:04d}.log")
    """Output of the script and the driver."""

    @property
    def agents(self) -> AgentFiles:
        """Files shared by driver and agents."""
        name = f"job-{self.number:04d}"
        return AgentFiles(self.path / f"{name}.driver.json", self.path / f"{name}.agents.log")

    claim = Below("job-{number:04d}.claim")
    """File with the batch system's id of the job, written by the script."""

    stop = Below("job-{number:04d}.stop")
    """Request by the script to end the job; its text is the reason, and may be missing."""

    live_metrics = Below("job-{number:04d}.metrics.json")
    """Live metrics of the members in training; the file exists while the job runs."""

    round_inputs = Below("job-{number:04d}.lineups.jsonl")
    """Inputs of rounds for the nodes' leaders: a line for each round with leaders."""

    exchange_log = Below("job-{number:04d}.exchange.log")
    """Output of the nodes' leaders."""

    def clear(self) -> None:
        """Remove the files that are needed only while the job runs, also after a killed job."""
        for path in (self.agents.address, self.live_metrics, self.stop):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class RunFolder:
    """``runs/<run>/``: all files that the jobs of a run read and write, except checkpoints."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.name

    spec = Below("run.json")
    """Specification of the run as submitted, with later changes."""

    record = Below("record.json")
    """Record of the run: all that the catalog has of it besides its specification and its events."""

    planner_state = Below("planner.json")
    """State of the planner for the next job."""

    state = Below("state.jsonl")
    """Snapshot of the state derived from the events: a cache from which readers continue."""

    results = Below("results.jsonl")
    """Results of the run and of its members at the end of its last job: a cache for commands on many runs."""

    tracking = Below("tracking.json")
    """Epochs and states that a tracker has been sent, so that commands with nothing new do not ask it."""

    tracking_lock = Below("tracking.lock")
    """Lock of the command that sends them."""

    lease = Below("driver.lease")
    """Driver that trains the run, or was the last to do so; touched while it trains."""

    def ticket(self, number: int) -> Path:
        """Return the file of a driver that waits for the lease, by the number that it drew."""
        return self.path / f"driver.lease.{number}"

    events = Below("events")
    """Folder of event files: one of JSON lines for each member, and the drivers'."""

    logs = Below("logs")
    """Folder of log files: the output of each member's ranks."""

    balance = Below("balance")
    """Folder of the logs of balanced batches, one for each member."""

    waves = Below("waves")
    """Folder of the logs of pipelines, one for each member and rank."""

    replay = Below("replay.jsonl")
    """Trace of the visits that the run repeats, if it repeats any."""

    modules = Below("modules")
    """Folder of copies of the user's modules, one for each version that jobs have used."""

    def events_of(self, source: str) -> Path:
        """Return the file of a member's events, or the drivers'."""
        return self.events / f"{source}.jsonl"

    def log_of(self, member: str) -> Path:
        """Return the output of a member's ranks."""
        return self.logs / f"{member}.log"

    def job(self, number: int) -> JobFiles:
        """Return the files of a job, existing or not."""
        return JobFiles(self.path, number)

    def create(self) -> RunFolder:
        """Create the folder and its subfolders."""
        for folder in (self.path, self.events, self.logs):
            make_private_folder(folder)
        return self


def member_folder(checkpoints: Path, run: str, member: str) -> Path:
    """Return the folder of a member's checkpoints; runs never share one.

    Parameters
    ----------
    checkpoints : Path
        Folder of all checkpoints.
    """
    return checkpoints / run / member


def tensorboard_file(folder: Path) -> Path:
    """Return the file of a member's epochs for TensorBoard, beside its checkpoints.

    TensorBoard shows runs by folder and recognizes its files by their names.
    """
    return folder / "events.out.tfevents.hetctl"


@dataclass(frozen=True)
class Home:
    """``$HETCTL_HOME``, or ``.hetctl`` in the project."""

    path: Path

    catalog = Below("catalog.db")
    """SQLite file of the catalog; only login nodes open it."""

    damaged_catalog = Below("catalog-damaged.db")
    """File of the last catalog that was replaced by a rebuilt one."""

    backups = Below("backups")
    """Folder of the backups of the catalog."""

    lock = Below("lock")
    """Lock file of the only process that may write."""

    runs = Below("runs")
    """Folder of all runs."""

    profiles = Below("profiles")
    """Folder of the folders of profiling jobs."""

    local_jobs = Below("local-jobs")
    """Folder of the local batch system."""

    def every_run(self) -> list[RunFolder]:
        """Return the folders of all runs that have been submitted, by name."""
        return [RunFolder(path.parent) for path in sorted(self.runs.glob(f"*/{RunFolder(Path()).spec}"))]

    def run(self, name: str) -> RunFolder:
        """Return a run's folder, existing or not."""
        return RunFolder(self.runs / name)

    checkpoints = Below("checkpoints")
    """Folder of all checkpoints."""

    removing = Below("removing")
    """Folder of runs whose removal has begun."""

    removed = Below("removed")
    """Folder of empty files with the names of runs that were removed."""
