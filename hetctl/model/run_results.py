"""Results of runs, beside each other and in lists, with their logs and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetctl.model.cost import Cost, Energy
from hetctl.model.seed_groups import PairedSeeds
from hetctl.model.values import dataclass


@dataclass(frozen=True)
class RunSummary:
    """Results of a run as a whole.

    Parameters
    ----------
    members, converged, failed : int
        Numbers of members; of a search, trials that have begun.
    metric, mode : str
        Metric that most members are judged by, and its better direction: ``min`` or ``max``.
    best : float or None
        Best value of it in any epoch of these members; None: there is none yet.
    member : str
        Member with this value.
    began_at : float or None
        Start of the first job in seconds since the epoch.
    gpu_seconds : float
        Time of all GPUs in tasks.
    cost : Cost
        Resources that its jobs have held.
    predicted_cost : Cost or None
        Those by the submitted plan; None if its rates were guesses.
    energy : Energy or None
        Energy of its tasks; None: not measured.
    event_bytes : int
        Length of the events of drivers and of requests that are included.
    """

    members: int
    converged: int
    failed: int
    metric: str
    mode: str
    best: float | None
    member: str
    began_at: float | None
    gpu_seconds: float
    cost: Cost
    energy: Energy | None
    predicted_cost: Cost | None = None
    event_bytes: int = 0


@dataclass(frozen=True)
class MemberResult:
    """Results of a member.

    Parameters
    ----------
    best : float or None
        Best value of its metric; None: no epoch has one.
    epoch : int or None
        First epoch with this value.
    epochs : int
        Finished epochs.
    seconds, gpu_seconds : float
        Time in tasks that have ended, and of all their GPUs.
    """

    member: str
    metric: str
    mode: str
    best: float | None
    epoch: int | None
    epochs: int
    seconds: float
    gpu_seconds: float


@dataclass(frozen=True)
class RunResults:
    """Results of a run and of its members, in the ensemble's order."""

    summary: RunSummary
    members: tuple[MemberResult, ...]


@dataclass(frozen=True)
class RunLine:
    """Run in a list.

    Parameters
    ----------
    submitted_at : float
        Seconds since the epoch.
    results : RunSummary or None
        Results so far; None: its folder is gone.
    """

    run: str
    ensemble: str
    site: str
    state: str
    submitted_at: float
    results: RunSummary | None

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours in tasks; None if its folder is gone."""
        return self.results.gpu_seconds / 3600 if self.results else None


@dataclass(frozen=True)
class LogFile:
    """Log of a run.

    Parameters
    ----------
    name : str
        Name of the member, or ``job 0``, ``agents of job 0``.
    bytes : int
        Its length.
    written_at : float
        Time of the last write, in seconds since the epoch.
    """

    name: str
    path: str
    bytes: int
    written_at: float


@dataclass(frozen=True)
class RunLogs:
    """Logs of a run: those of its jobs by number, and those of its members, the last written first."""

    run: str
    jobs: tuple[LogFile, ...]
    members: tuple[LogFile, ...]


@dataclass(frozen=True)
class Removal:
    """Run to be removed, with the sizes of its files in bytes.

    Parameters
    ----------
    state : str
        State of the run; empty for files that a removal cut short has left.
    """

    run: str
    state: str
    folder_bytes: int
    checkpoint_bytes: int


@dataclass(frozen=True)
class Pruned:
    """Run of which the checkpoints of best epochs alone are left.

    Parameters
    ----------
    members : tuple of str
        Members with such a checkpoint; of all others none was deleted.
    freed_bytes : int
        Size of what was deleted.
    """

    run: str
    members: tuple[str, ...]
    freed_bytes: int


@dataclass(frozen=True)
class Difference:
    """Key that differs between runs.

    Parameters
    ----------
    key : str
        Key of a member, as ``config.lr``, or of the run, as ``planner``.
    members : tuple of str
        Members with these values; empty for a key of the run.
    values : tuple
        Value in each run; None also stands for a key that is not there.
    """

    key: str
    members: tuple[str, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class RunComparison:
    """Runs beside each other.

    Parameters
    ----------
    runs : tuple of RunLine
        The runs.
    differences : tuple of Difference
        Keys that differ; of members, those that all runs have.
    members : mapping of str to tuple
        Results by member and run; None in runs without it.
    seeds : tuple of PairedSeeds
        Members that differ in their seed alone, in each other run less the first one.
    """

    runs: tuple[RunLine, ...]
    differences: tuple[Difference, ...]
    members: Mapping[str, tuple[MemberResult | None, ...]]
    seeds: tuple[PairedSeeds, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Explanation of a member's state.

    Parameters
    ----------
    reasons : tuple of str
        Reasons, the most important first.
    log_tail : tuple of str
        Last lines of the log of a member that failed.
    next_step : str
        What the user can do; empty if there is nothing to do.
    """

    run: str
    member: str
    state: str
    reasons: tuple[str, ...]
    log_tail: tuple[str, ...]
    log: str
    next_step: str
