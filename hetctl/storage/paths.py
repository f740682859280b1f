"""Layout of ``$HETCTL_HOME``: the only module that defines file names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetctl.storage.atomic_io import make_private_folder


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

    folder: Path
    number: int

    @property
    def script(self) -> Path:
        """The batch script."""
        return self._file("sh")

    @property
    def of_next(self) -> JobFiles:
        """Files of the next job of the run; its script exists as soon as it may have been submitted."""
        return JobFiles(self.folder, self.number + 1)

    @property
    def log(self) -> Path:
        """Output of the script and the driver."""
        return self._file("log")

    @property
    def agents(self) -> AgentFiles:
        """Files shared by driver and agents."""
        return AgentFiles(self._file("driver.json"), self._file("agents.log"))

    @property
    def claim(self) -> Path:
        """File with the batch system's id of the job, written by the script."""
        return self._file("claim")

    @property
    def stop(self) -> Path:
        """Request by the script to end the job; its text is the reason, and may be missing."""
        return self._file("stop")

    @property
    def live_metrics(self) -> Path:
        """Live metrics of the members in training; the file exists while the job runs."""
        return self._file("metrics.json")

    @property
    def lineups(self) -> Path:
        """Lineups of rounds for the nodes' leaders: a line for each round with a lineup."""
        return self._file("lineups.jsonl")

    @property
    def exchange_log(self) -> Path:
        """Output of the nodes' leaders."""
        return self._file("exchange.log")

    def clear(self) -> None:
        """Remove the files that are needed only while the job runs, those left by a killed job included."""
        for path in (self.agents.address, self.live_metrics, self.stop):
            path.unlink(missing_ok=True)

    def _file(self, ending: str) -> Path:
        return self.folder / f"job-{self.number:04d}.{ending}"


@dataclass(frozen=True)
class RunFolder:
    """``runs/<run>/``: all files that the jobs of a run read and write, except checkpoints."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.name

    @property
    def spec(self) -> Path:
        """Specification of the run as submitted, with later changes."""
        return self.path / "run.json"

    @property
    def record(self) -> Path:
        """Record of the run: all that the catalog has of it besides its specification and its events."""
        return self.path / "record.json"

    @property
    def planner_state(self) -> Path:
        """State of the planner for the next job."""
        return self.path / "planner.json"

    @property
    def state(self) -> Path:
        """Snapshot of the state derived from the events: a cache from which readers continue."""
        return self.path / "state.jsonl"

    @property
    def lease(self) -> Path:
        """The driver that trains the run, or the last one that did; touched as long as it does."""
        return self.path / "driver.lease"

    def ticket(self, number: int) -> Path:
        """Return the file of a driver that waits for the lease, by the number that it drew."""
        return self.path / f"driver.lease.{number}"

    @property
    def events(self) -> Path:
        """Folder of event files: one of JSON lines for each member, and the drivers'."""
        return self.path / "events"

    @property
    def logs(self) -> Path:
        """Folder of log files: the output of each member's ranks."""
        return self.path / "logs"

    @property
    def balance(self) -> Path:
        """Folder of the logs of balanced batches, one for each member."""
        return self.path / "balance"

    @property
    def waves(self) -> Path:
        """Folder of the logs of pipelines, one for each member and rank."""
        return self.path / "waves"

    @property
    def replay(self) -> Path:
        """Trace of the visits that the run repeats, if it repeats any."""
        return self.path / "replay.jsonl"

    @property
    def modules(self) -> Path:
        """Folder of copies of the user's modules, one for each version that jobs have used."""
        return self.path / "modules"

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

    @property
    def catalog(self) -> Path:
        """SQLite file of the catalog; only login nodes open it."""
        return self.path / "catalog.db"

    @property
    def damaged_catalog(self) -> Path:
        """File of the last catalog that was replaced by a rebuilt one."""
        return self.path / "catalog-damaged.db"

    @property
    def backups(self) -> Path:
        """Folder of the backups of the catalog."""
        return self.path / "backups"

    @property
    def lock(self) -> Path:
        """Lock file of the only process that may write."""
        return self.path / "lock"

    @property
    def runs(self) -> Path:
        """Folder of all runs."""
        return self.path / "runs"

    @property
    def profiles(self) -> Path:
        """Folder of the folders of profiling jobs."""
        return self.path / "profiles"

    @property
    def local_jobs(self) -> Path:
        """Folder of the local batch system."""
        return self.path / "local-jobs"

    def every_run(self) -> list[RunFolder]:
        """Return the folders of all runs that have been submitted, by name."""
        return [RunFolder(path.parent) for path in sorted(self.runs.glob(f"*/{RunFolder(Path()).spec}"))]

    def run(self, name: str) -> RunFolder:
        """Return a run's folder, existing or not."""
        return RunFolder(self.runs / name)

    @property
    def checkpoints(self) -> Path:
        """Folder of all checkpoints."""
        return self.path / "checkpoints"
