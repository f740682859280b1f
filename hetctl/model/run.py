"""A run as it was submitted: all that its jobs need to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetctl.model.ensemble import Ensemble
from hetctl.model.profile import MemberProfile, PreprocessPoint
from hetctl.model.site import Site

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
        Absolute folder of all checkpoints.
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


@dataclass(frozen=True)
class Usage:
    """Rounds started, and the GPU-seconds that steps held; a running step counts until `now`."""

    rounds: int
    gpu_seconds: float
