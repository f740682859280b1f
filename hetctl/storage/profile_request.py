"""The files of profiling jobs: which points to measure, and which jobs were submitted for them."""

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
    """A member on a number of GPUs; `source` names its event file and its log."""

    member: str
    gpus: int

    @property
    def source(self) -> str:
        """``member-gpus``: members cannot contain a slash, and the number comes last."""
        return f"{self.member}-{self.gpus}"


@dataclass(frozen=True)
class Measurements:
    """The points of one profiling job.

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
    """Return where a profiling folder keeps its `Measurements`."""
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
        Unique: by it the batch system is asked for jobs whose submission was cut short.
    ensemble, site : str
        Their names.
    folders : tuple of str
        Names of the profiling folders, one for each job.
    wall_s : int
        Limit of each job.
    submitted_at : float
        Seconds since the epoch.
    ids : tuple of str
        The batch system's, in the order of the folders; "" for a job that it does not have. Empty as
        long as nobody knows whether it has them.
    over : bool
        Whether all have ended and the catalog has what they measured.
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
    """Return where the first of the folders keeps its `ProfileJobs`."""
    return folder / "jobs.json"


def write_jobs(folder: Path, jobs: ProfileJobs) -> None:
    """Write ``jobs.json``."""
    write_json(jobs_file(folder), encode(jobs))


def read_jobs(folder: Path) -> ProfileJobs:
    """Read ``jobs.json``."""
    return decode(ProfileJobs, json.loads(jobs_file(folder).read_text(encoding="utf-8")))
