"""What the nodes of a job are like, told by themselves: ``python -m hetctl.runtime.probe FOLDER [--rank]``.

Without ``--rank`` it stands for the driver: one step with a rank for each GPU of the job, which is over
within a minute or ended. With it, it is one of these ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hetctl.core.codec import decode
from hetctl.core.layout import write_json
from hetctl.core.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.core.site import Site
from hetctl.launchers import LAUNCHERS
from hetctl.runtime.device import bind_device
from hetctl.runtime.nodes import nodes_of_this_job
from hetctl.runtime.steps import StepPool

NAME = "probe"
SITE_FILE, END_FILE, LOG_FILE = "site.json", "end.json", "probe.log"
PATIENCE_S, POLL_S = 120.0, 0.2


@dataclass(frozen=True)
class RankReport:
    """What one rank saw.

    Parameters
    ----------
    gpus : str
        The GPUs that it was given, by its variable; empty at a site with slots.
    mpi_size : int or None
        Ranks of its MPI world; None if mpi4py cannot be imported.
    """

    node: str
    gpus: str
    cores: tuple[int, ...]
    mpi_size: int | None


@dataclass(frozen=True)
class StepEnd:
    """How the step ended.

    Parameters
    ----------
    ranks : int
        How many there should have been.
    exit_code : int or None
        None if it hung.
    """

    nodes: tuple[str, ...]
    ranks: int
    exit_code: int | None


def drive(folder: Path) -> None:
    """Start one step over all nodes of this job, and write how it ended."""
    site = decode(Site, json.loads((folder / SITE_FILE).read_text(encoding="utf-8")))
    nodes = nodes_of_this_job(site)
    placement = tuple(Placement(node.name, node.gpus) for node in nodes)
    ranks = sum(len(node.gpus) for node in nodes)
    pool = StepPool()
    command = (sys.executable, "-m", "hetctl.runtime.probe", str(folder), "--rank")
    allocation = Allocation(NAME, ranks, DATA_PARALLEL, 0.0, placement)
    pool.launch(NAME, LAUNCHERS[site.launcher](site, allocation, command), folder / LOG_FILE)
    end = time.monotonic() + PATIENCE_S
    while not (over := pool.reap()) and time.monotonic() < end:
        time.sleep(POLL_S)
    names = tuple(node.name for node in nodes)
    write_json(folder / END_FILE, vars(StepEnd(names, ranks, over[0].exit_code if over else None)))


def report(folder: Path) -> None:
    """Write what this rank sees."""
    site = decode(Site, json.loads((folder / SITE_FILE).read_text(encoding="utf-8")))
    size = _mpi_size()
    cores = bind_device(site.device, site.gpus_per_node)
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    gpus = os.environ.get(site.visible_devices, "") if site.device == "gpu" else ""
    write_json(folder / f"rank-{node}-{os.getpid()}.json", vars(RankReport(node, gpus, cores, size)))


def _mpi_size() -> int | None:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return int(MPI.COMM_WORLD.Get_size())


if __name__ == "__main__":
    (report if "--rank" in sys.argv[2:] else drive)(Path(sys.argv[1]))
