"""Files of profiling jobs: the points to measure, and the submitted jobs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hetctl.model.ensemble import Ensemble
from hetctl.model.serialization import decode, encode
from hetctl.model.site import Site
from hetctl.storage.atomic_io import write_json


@dataclass(frozen=True)
class ProfileTarget:
    """Member on a number of GPUs; `source` names its event file and its log."""

    member: str
    gpus: int

    @property
    def source(self) -> str:
        """Name ``member-gpus``; members cannot contain a slash, and the number comes last."""
        return f"{self.member}-{self.gpus}"


@dataclass(frozen=True)
class Measurements:
    """Points to be measured by one profiling job.

    Parameters
    ----------
    preprocess_cores : tuple of int
        Numbers of cores on which the preprocessing function is measured.
    """

    ensemble: Ensemble
    site: Site
    points: tuple[ProfileTarget, ...]
    preprocess_cores: tuple[int, ...]


def measurements_file(folder: Path) -> Path:
    """Return the path of the `Measurements` of a profiling folder."""
    return folder / "measurements.json"


def write_measurements(folder: Path, measurements: Measurements) -> None:
    """Write ``measurements.json``."""
    write_json(measurements_file(folder), encode(measurements))


def read_measurements(folder: Path) -> Measurements:
    """Read ``measurements.json``."""
    return decode(Measurements, json.loads(measurements_file(folder).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class ProfileJobs:
    """Profiling jobs that were submitted together.

    Parameters
    ----------
    name : str
        Unique name, by which the batch system is asked for jobs whose submission was interrupted.
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


def jobs_file(folder: Path) -> Path:
    """Return the path of the `ProfileJobs`, in the first of the folders."""
    return folder / "jobs.json"


def write_jobs(folder: Path, jobs: ProfileJobs) -> None:
    """Write ``jobs.json``."""
    write_json(jobs_file(folder), encode(jobs))


def read_jobs(folder: Path) -> ProfileJobs:
    """Read ``jobs.json``."""
    return decode(ProfileJobs, json.loads(jobs_file(folder).read_text(encoding="utf-8")))
