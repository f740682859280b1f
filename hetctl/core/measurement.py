"""The file that a profiling job reads: which points to measure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hetctl.core.codec import decode, encode
from hetctl.core.ensemble import Ensemble
from hetctl.core.layout import write_json
from hetctl.core.site import Site


@dataclass(frozen=True)
class Point:
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
    points: tuple[Point, ...]
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
