"""The files that the login node and the compute nodes meet in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetctl.core.codec import decode, encode
from hetctl.core.ensemble import Ensemble
from hetctl.core.layout import RunFolder, write_json
from hetctl.core.plan import Allocation
from hetctl.core.profile import MemberProfile, PreprocessPoint
from hetctl.core.site import ANY_INTERFACES, USUAL_TIMEOUTS, NetworkInterfaces, Site, Timeouts

SCHEMA_VERSION = 1

NONE, CACHED, LOCKSTEP = "none", "cached", "lockstep"
"""How the members on a node share the preparation of samples."""


@dataclass(frozen=True)
class Budget:
    """What stops a runaway; None means without limit."""

    max_jobs: int | None = None
    max_rounds: int | None = None
    gpu_hours: float | None = None


@dataclass(frozen=True)
class RunSpec:
    """All that a job's driver needs to plan and run rounds without asking anybody.

    Parameters
    ----------
    gpus : int
        Of each job.
    wall_s : int
        Wall-clock limit of each job.
    grace_s : int
        Trainers are told to checkpoint this long before the limit.
    chain : bool
        Each job has the next one queued behind it as soon as it starts.
    retries : int
        Failed steps without a finished epoch that a member is forgiven.
    checkpoints : str
        Absolute folder; a member's are in ``<member>/<run>`` below it.
    sharing : str
        ``none``: each member prepares its samples for itself. ``cached``: each sample is prepared once on
        a node, for all.
    preprocess : tuple of PreprocessPoint
        Measured throughput of preprocessors.
    given : mapping
        What the user named of `site` (a name, or an absolute path), `account`, `launch`, `queue` and
        `planner`: it holds where the site file changes.
    """

    run: str
    ensemble: Ensemble
    site: Site
    planner: str
    gpus: int
    queue: str
    wall_s: int
    grace_s: int
    profiles: tuple[MemberProfile, ...]
    checkpoints: str
    options: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 2
    chain: bool = False
    budget: Budget = field(default_factory=Budget)
    sharing: str = NONE
    preprocess: tuple[PreprocessPoint, ...] = ()
    given: Mapping[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def checkpoint_folder(self, member: str) -> Path:
        """Return where a member's checkpoints lie."""
        return Path(self.checkpoints) / member / self.run


@dataclass(frozen=True)
class RoundFile:
    """What the trainers of one round read.

    Parameters
    ----------
    deadline : float
        Seconds since the epoch; an epoch that would end later is not started.
    longest_s : float or None
        What a whole job has for training; an epoch that takes longer is trained in parts. None: none is.
    memory : Any
        What the planner wanted to remember when the round was opened; the next job goes on from it.
    sharing, preprocess
        As in `RunSpec`.
    cores, gpus_per_node : int
        Of a node; the cores are for all ranks and preprocessors on it.
    led : bool
        In lockstep, whether the nodes have leaders that exchange what each prepares.
    gpu_types : mapping of str to str
        By member: the type of its GPUs, where the site has several and a member's are of one.
    network : NetworkInterfaces
        As the site has them.
    timeouts : Timeouts
        As the site has them.
    """

    run: str
    index: int
    job: int
    deadline: float
    ensemble: Ensemble
    allocations: tuple[Allocation, ...]
    checkpoints: str
    memory: Any = None
    longest_s: float | None = None
    sharing: str = NONE
    preprocess: tuple[PreprocessPoint, ...] = ()
    cores: int = 1
    gpus_per_node: int = 1
    led: bool = False
    gpu_types: Mapping[str, str] = field(default_factory=dict)
    network: NetworkInterfaces = ANY_INTERFACES
    timeouts: Timeouts = USUAL_TIMEOUTS
    schema_version: int = SCHEMA_VERSION

    def allocation_of(self, member: str) -> Allocation:
        """Return a member's allocation; KeyError if it is not in this round."""
        for allocation in self.allocations:
            if allocation.member == member:
                return allocation
        raise KeyError(member)

    def checkpoint_folder(self, member: str) -> Path:
        """Return where a member's checkpoints lie."""
        return Path(self.checkpoints) / member / self.run


def write_spec(folder: RunFolder, spec: RunSpec) -> None:
    """Write ``run.json``."""
    write_json(folder.spec, encode(spec))


def read_spec(folder: RunFolder) -> RunSpec:
    """Read ``run.json``."""
    return decode(RunSpec, json.loads(folder.spec.read_text(encoding="utf-8")))


def write_round(path: Path, round_file: RoundFile) -> None:
    """Write ``round.json``."""
    write_json(path, encode(round_file))


def read_round(path: Path) -> RoundFile:
    """Read ``round.json``."""
    return decode(RoundFile, json.loads(path.read_text(encoding="utf-8")))
