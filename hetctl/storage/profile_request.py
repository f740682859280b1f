"""Files of profiling jobs: the points to measure, and the submitted jobs."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from hetctl.model.ensemble import Ensemble
from hetctl.model.profile import ProfilePoint
from hetctl.model.serialization import encode
from hetctl.model.site import Site
from hetctl.model.values import dataclass
from hetctl.storage.atomic_io import read_json, write_json

RATE, LAYERS, LINKS = "rate", "layers", "links"
REPAIR = "delete it once its job has ended; `hetctl profile` measures again what is missing"
"""Next step for a user whose profiling job has a damaged file."""
USUAL_COMMAND_S = 60.0
"""Seconds for which a command is profiled unless the user says otherwise."""


@dataclass(frozen=True)
class ProfileTarget:
    """A measurement by one group of ranks; `source` names its event file and its log.

    Parameters
    ----------
    member : str
        Name of the member; for `LINKS` their `link`, as in `LinkPoint`.
    gpus : int
        Number of ranks.
    what : str
        `RATE` of the member on so many GPUs, its `LAYERS`, or `LINKS` between two ranks.
    gpu_type : str or None
        Type of GPU for `LAYERS` at a site with several types; else None.
    """

    member: str
    gpus: int
    what: str = RATE
    gpu_type: str | None = None

    @property
    def source(self) -> str:
        """Name ``member-gpus``, ``member@layers``, ``member@layers-type`` or ``kind@links``."""
        if self.what == RATE:
            return f"{self.member}-{self.gpus}"
        # Names of members contain no @; a type is any line of text.
        of_type = f"-{quote(self.gpu_type, safe='')}" if self.gpu_type else ""
        return f"{self.member}@{self.what}{of_type}"

    @property
    def title(self) -> str:
        """Name for people: ``resnet on 4``, ``layers of resnet on V100``, ``intra-node links``."""
        if self.what == RATE:
            return f"{self.member} on {self.gpus}"
        if self.what == LINKS:
            return f"{self.member} links"
        return f"layers of {self.member}" + (f" on {self.gpu_type}" if self.gpu_type else "")


@dataclass(frozen=True)
class Measurements:
    """Points to be measured by one profiling job.

    Parameters
    ----------
    preprocess_cores : tuple of int
        Numbers of cores on which the preprocessing function is measured.
    command_s : float
        Seconds for which the command of a member runs at most, on each number of GPUs.
    planned_gpus : int or None
        GPUs of the plan; points that cannot change it are skipped. None: all points are measured.
    known : tuple of ProfilePoint
        Rates that were known before.
    """

    ensemble: Ensemble
    site: Site
    points: tuple[ProfileTarget, ...]
    preprocess_cores: tuple[int, ...]
    command_s: float = USUAL_COMMAND_S
    planned_gpus: int | None = None
    known: tuple[ProfilePoint, ...] = ()

    def target(self, source: str) -> ProfileTarget:
        """Return the target of that source."""
        return next(point for point in self.points if point.source == source)


def measurements_file(folder: Path) -> Path:
    """Return the path of the `Measurements` of a profiling folder."""
    return folder / "measurements.json"


def write_measurements(folder: Path, measurements: Measurements) -> None:
    """Write ``measurements.json``."""
    write_json(measurements_file(folder), encode(measurements))


def read_measurements(folder: Path) -> Measurements:
    """Read ``measurements.json``; DamagedFileError if it is damaged."""
    return read_json(measurements_file(folder), Measurements, REPAIR)


@dataclass(frozen=True)
class ProfileJobs:
    """Profiling jobs that were submitted together.

    Parameters
    ----------
    name : str
        Beginning of the unique names of the jobs, followed by their numbers.
    ensemble, site : str
        Names of the ensemble and the site.
    folders : tuple of str
        Names of the profiling folders, one for each job.
    wall_s : int
        Wall-clock limit of each job in seconds.
    submitted_at : float
        Time of submission in seconds since the epoch.
    ids : tuple of str
        Ids of the batch system in the order of the folders; "" for a job that it does not have. Empty while
        it is unknown whether it has the jobs.
    over : bool
        True if all jobs have ended and the catalog has their measurements.
    """

    name: str
    ensemble: str
    site: str
    folders: tuple[str, ...]
    wall_s: int
    submitted_at: float
    ids: tuple[str, ...] = ()
    over: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the jobs, by which the next command finds an interrupted submission."""
        return tuple(f"{self.name}-{number}" for number in range(len(self.folders)))


def ended_file(folder: Path) -> Path:
    """Return the path of the empty file that a job leaves in its folder when it has ended."""
    return folder / "ended"


def jobs_file(folder: Path) -> Path:
    """Return the path of the `ProfileJobs`, in the first of the folders."""
    return folder / "jobs.json"


def write_jobs(folder: Path, jobs: ProfileJobs) -> None:
    """Write ``jobs.json``."""
    write_json(jobs_file(folder), encode(jobs))


def read_jobs(folder: Path) -> ProfileJobs:
    """Read ``jobs.json``; DamagedFileError if it is damaged."""
    return read_json(jobs_file(folder), ProfileJobs, REPAIR)
