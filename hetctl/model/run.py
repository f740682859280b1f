"""A submitted run: all data that its jobs need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from hetctl.model.cost import Cost
from hetctl.model.ensemble import Ensemble
from hetctl.model.plan import DATA_PARALLEL
from hetctl.model.profile import MemberProfile, PreprocessPoint
from hetctl.model.serialization import TABLE
from hetctl.model.site import Site
from hetctl.model.values import dataclass

SCHEMA_VERSION = 1

NONE, CACHED, LOCKSTEP = "none", "cached", "lockstep"
"""Ways in which members on a node share the preparation of samples."""


@dataclass(frozen=True)
class Usage:
    """Resources that a run has used; tasks and jobs that go on count until the query.

    Parameters
    ----------
    rounds : int
        Rounds started.
    gpu_seconds, node_seconds : float
        Time of all GPUs in tasks, and of all nodes in jobs.
    energy_j : float or None
        Energy in joules of the GPUs or slots of tasks that have ended; None: nothing was measured.
    """

    rounds: int
    gpu_seconds: float
    node_seconds: float = 0.0
    energy_j: float | None = None


NOTHING_USED = Usage(0, 0.0)


@dataclass(frozen=True)
class Budget:
    """Limits of a run's resources from the time at which they were granted; None means no limit.

    Parameters
    ----------
    since : Usage
        Resources that the run had used by then.
    """

    max_jobs: int | None = None
    max_rounds: int | None = None
    gpu_hours: float | None = None
    node_hours: float | None = None
    since: Usage = NOTHING_USED

    def exceeded(self, usage: Usage) -> str | None:
        """Return the limit that forbids another round, or None."""
        if self.max_rounds is not None and usage.rounds - self.since.rounds >= self.max_rounds:
            return f"--max-rounds {self.max_rounds} is reached"
        hours = (usage.gpu_seconds - self.since.gpu_seconds) / 3600
        if self.gpu_hours is not None and hours >= self.gpu_hours:
            return f"--gpu-hours {self.gpu_hours:g} is used up ({hours:.2f})"
        return None

    def wall_left_s(self, usage: Usage, nodes: int) -> float:
        """Return the longest time in seconds of a job on so many nodes within the node-hours."""
        if self.node_hours is None:
            return math.inf
        return (3600 * self.node_hours - usage.node_seconds + self.since.node_seconds) / nodes

    def exceeded_by_jobs(self, jobs: int) -> str | None:
        """Return the limit on jobs if it forbids another after `jobs` since it was granted, or None."""
        if self.max_jobs is not None and jobs >= self.max_jobs:
            return f"--max-jobs {self.max_jobs} is reached"
        return None


@dataclass(frozen=True)
class MemberEdit:
    """Changes of a member by commands, which take precedence over the ensemble file.

    Parameters
    ----------
    added : bool
        True if the member stays without an entry in the file.
    dropped : bool
        True if the member has left the run, whatever the file says.
    stop : mapping of str to tuple
        Values of keys of its stop rule, each with the one that the file had then: another one there counts.
    """

    added: bool = False
    dropped: bool = False
    stop: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunSpec:
    """Complete specification by which a job's driver plans and runs rounds.

    Parameters
    ----------
    gpus : int
        GPUs of each job.
    wall_s : int
        Wall-clock limit of each job in seconds.
    grace_s : int
        Seconds before the limit at which trainers are asked to write a checkpoint.
    chain : bool
        If true, each job submits the next one as soon as it starts.
    ahead : int
        Jobs that a command queues at once, each behind the one before.
    retries : int
        Failed tasks without a finished epoch after which a member is still retried.
    checkpoints : str
        Absolute folder of all checkpoints.
    sharing : str
        ``none``: each member prepares its samples for itself. ``cached``: each sample is prepared once per
        node, for all members.
    mode : str
        Requested mode of training: ``data-parallel``, ``hopper``, ``pipeline``, or ``auto``, in which jobs
        train pipelines, hops, and the data-parallel or balanced phase one after another.
    phases : tuple of str
        Modes of the plan's phases, in their order.
    pipelines : mapping of str to Any
        Members that train as pipelines, each with its encoded `methods.pipeline.layouts.PipelineProblem`.
    replay : str
        Absolute path of the trace whose visits the run repeats; empty: visits are planned.
    preprocess : tuple of PreprocessPoint
        Measured throughputs of preprocessors.
    modules : mapping of str to str
        Digests of the user's modules by path in the ensemble's folder; the run keeps a copy of these. Empty:
        jobs import from that folder.
    revision : str
        Revision of the ensemble's folder when its modules were taken, as Git describes it; empty: none.
    given : mapping
        Values that the user gave for `site` (a name, or an absolute path), `account`, `launch`, `queue`,
        `planner` and `job_options` (as JSON), which take precedence when the site file changes, and for
        `modules`.
    earlier_jobs : int
        Number of jobs before `hetctl submit` last continued the run; these cannot stall it.
    edits : int
        Number of commands that have edited the run; their requests have it, for the driver.
    edited : mapping of str to MemberEdit
        Members that commands have edited, by name.
    track : str
        Tracker to which commands of the login side forward its epochs: ``mlflow``; empty: none.
    predicted_s : float or None
        Makespan of the submitted plan in seconds; None if its rates were guesses.
    """

    run: str
    ensemble: Ensemble
    site: Site
    planner: str
    gpus: int
    queue: str
    wall_s: int
    grace_s: int
    profiles: tuple[MemberProfile, ...] = field(metadata=TABLE)
    checkpoints: str
    options: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 2
    chain: bool = False
    budget: Budget = field(default_factory=Budget)
    sharing: str = NONE
    mode: str = DATA_PARALLEL
    phases: tuple[str, ...] = (DATA_PARALLEL,)
    pipelines: Mapping[str, Any] = field(default_factory=dict)
    replay: str = ""
    preprocess: tuple[PreprocessPoint, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    revision: str = ""
    given: Mapping[str, str] = field(default_factory=dict)
    earlier_jobs: int = 0
    edits: int = 0
    edited: Mapping[str, MemberEdit] = field(default_factory=dict)
    track: str = ""
    ahead: int = 1
    predicted_s: float | None = None
    schema_version: int = SCHEMA_VERSION

    def cost(self, node_seconds: float) -> Cost:
        """Return the cost of jobs of the run, by the time of all their nodes in seconds."""
        return self.site.cost(node_seconds, self.gpus)

    @property
    def may_chain(self) -> bool:
        """True if the queue permits that a job submits or awaits another one."""
        return all(queue.chain for queue in self.site.queues if queue.name == self.queue)

    @property
    def predicted_cost(self) -> Cost | None:
        """Cost by the submitted plan; None if its rates were guesses."""
        return None if self.predicted_s is None else self.cost(self.predicted_s * self.nodes)

    @property
    def nodes(self) -> int:
        """Nodes of each job."""
        return -(-self.gpus // self.site.gpus_per_node)
