"""Projects whose members are measured in no time, and what their profiling jobs left on the disk."""

from __future__ import annotations

from pathlib import Path

from workbench import ProjectFolder, pretending_project

from hetctl.model.events import Event
from hetctl.storage.event_files import read_folder

ENSEMBLE = """\
name: many
framework: tensorflow
functions: {{input_fn: nets:input_fn, model_fn: nets:model_fn}}
members:
{members}
"""
MODULE = """\
import numpy as np
def input_fn(path):
    x = np.zeros((8, 2))
    return (x, x), (x, x)
def model_fn(config): ...
"""


def profiling_project(folder: Path, **environment: str) -> ProjectFolder:
    """Make a project on the local site, or on the one that the environment names."""
    made = pretending_project(folder, environment={"HETCTL_SITE": "local", **environment})
    (made.path / "nets.py").write_text(MODULE)
    return made


def members(project: ProjectFolder, **configs: tuple[int, str]) -> None:
    """Write the ensemble: for each member the most GPUs it may have, and its configuration."""
    lines = (
        f"  - {{name: {name}, max_gpus: {gpus}, config: {config}}}"
        for name, (gpus, config) in configs.items()
    )
    (project.path / "ensemble.yaml").write_text(ENSEMBLE.format(members="\n".join(lines)))


def events_below(project: ProjectFolder) -> list[Event]:
    """Return all events of all profiling jobs."""
    return [event for events in project.home.profiles.glob("*/events") for event in read_folder(events)]


def measurings(project: ProjectFolder) -> list[str]:
    """Return the sources of all points, each as often as it was measured."""
    return sorted(event.source for event in events_below(project) if event.kind == "point")


def measured(project: ProjectFolder) -> list[tuple[str, int]]:
    """Return the points that are shown."""
    points = project.here("profile", "show", "--json").json["points"]
    return sorted((point["member"], point["gpus"]) for point in points)


def local_jobs(project: ProjectFolder) -> list[str]:
    """Return the names of all local jobs that were ever submitted."""
    return sorted(path.stem for path in (project.home.path / "local-jobs").glob("*.claim"))
