"""A short job that tries a site: ``python -m hetctl.runtime.probe FOLDER [--leader]``.

Without ``--leader`` it stands for the driver: it starts ranks on all GPUs of the job as a driver does, and
then, where there are several nodes, the leaders of nodes in lockstep. With it, it is one of these leaders.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetctl.core.codec import decode, encode
from hetctl.core.layout import make_private_folder, write_json
from hetctl.core.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.core.site import Node, Site
from hetctl.launchers.leaders import LEADERS
from hetctl.runtime.assignment import PROBE, Task
from hetctl.runtime.crew import LOG, Crew
from hetctl.runtime.nodes import nodes_of_this_job
from hetctl.runtime.steps import StepPool

NAME = "probe"
SITE_FILE, END_FILE, LOG_FILE = "site.json", "end.json", f"logs/{LOG}"
LEADERS_LOG = "logs/leaders.log"
PATIENCE_S, POLL_S = 120.0, 0.2


@dataclass(frozen=True)
class RankReport:
    """Facts that one rank found.

    Parameters
    ----------
    gpu : int
        Number of its own GPU or slot.
    visible : str or None
        Value of the site's variable of visible devices; None if it is not set.
    """

    node: str
    gpu: int
    visible: str | None
    cores: tuple[int, ...]


@dataclass(frozen=True)
class ProbeEnd:
    """End of the job.

    Parameters
    ----------
    ranks : int
        How many there should have been.
    exit_code : int or None
        Of the group of all ranks; None if it hung.
    leaders_exit_code : int or None
        Of the step of the leaders; None if it hung, or there are none.
    mpi_sizes : tuple of int
        Ranks of the MPI world of each leader; 0 if mpi4py cannot be imported.
    """

    nodes: tuple[str, ...]
    ranks: int
    exit_code: int | None
    leaders_exit_code: int | None = None
    mpi_sizes: tuple[int, ...] = ()


def drive(folder: Path) -> None:
    """Start ranks and leaders on all nodes of this job, and write how they ended."""
    site = decode(Site, json.loads((folder / SITE_FILE).read_text(encoding="utf-8")))
    nodes = nodes_of_this_job(site)
    make_private_folder(folder / "logs")
    exit_code = _start_ranks(site, nodes, folder)
    led = len(nodes) > 1 and site.launcher in LEADERS
    leaders_exit_code = _start_leaders(site, nodes, folder) if led else None
    sizes = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("leader-*.json")]
    end = ProbeEnd(
        tuple(node.name for node in nodes),
        sum(len(node.gpus) for node in nodes),
        exit_code,
        leaders_exit_code,
        tuple(sizes),
    )
    write_json(folder / END_FILE, encode(end))


def _start_ranks(site: Site, nodes: Sequence[Node], folder: Path) -> int | None:
    """Let a group of all GPUs report; return its exit code, or None if it hung."""
    placement = tuple(Placement(node.name, node.gpus) for node in nodes)
    allocation = Allocation(NAME, sum(len(node.gpus) for node in nodes), DATA_PARALLEL, 0.0, placement)
    crew = Crew(site, nodes, folder, framework=None)
    try:
        crew.engage(Task(PROBE, str(folder), NAME), allocation)
        end = time.monotonic() + PATIENCE_S
        while not (over := crew.reap()) and time.monotonic() < end:
            time.sleep(POLL_S)
    finally:
        crew.leave()
    return over[0].exit_code if over else None


def _start_leaders(site: Site, nodes: Sequence[Node], folder: Path) -> int | None:
    pool = StepPool()
    command = (sys.executable, "-m", "hetctl.runtime.probe", str(folder), "--leader")
    step = LEADERS[site.launcher](site, NAME, [node.name for node in nodes], command)
    pool.launch(step, folder / LEADERS_LOG)
    end = time.monotonic() + PATIENCE_S
    while not (over := pool.reap()) and time.monotonic() < end:
        time.sleep(POLL_S)
    pool.end(POLL_S)
    return over[0].exit_code if over else None


def lead(folder: Path) -> None:
    """Write the size of this leader's MPI world."""
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    write_json(folder / f"leader-{node}-{os.getpid()}.json", _mpi_size())


def _mpi_size() -> int:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return 0
    return int(MPI.COMM_WORLD.Get_size())


if __name__ == "__main__":
    (lead if "--leader" in sys.argv[2:] else drive)(Path(sys.argv[1]))
