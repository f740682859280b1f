"""Searches for hyper-parameters: their definition in ensemble files, and trials with results for display."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from hetctl.model.file_keys import DURATION, Key
from hetctl.model.values import dataclass

TRIAL, REPORT, SEARCH_ENDED = "trial", "trial_report", "search_ended"
"""Kinds of a search's events, which the driver writes: request of a trial, its result, the end."""
PART = "part"
"""Kind of event for metrics that a member reports within an epoch."""
PRUNED = "pruned"
"""Reason for which a trial leaves that its search has ended within an epoch."""
OF_SEARCHES = frozenset({TRIAL, REPORT, SEARCH_ENDED})
DELAYED, PROMOTION, STOPPING = "delayed", "promotion", "stopping"
ASHA_VARIANTS = (DELAYED, PROMOTION, STOPPING)
"""Variants of ASHA. In the first two, trials pause at a rung until they are among its best; the first
promotes fewer from the first rung while others are left to begin. In the last, trials go on or end as soon as
they report."""


@dataclass(frozen=True)
class SearchBudget:
    """Limits after which no trial is begun or continued."""

    epochs: Annotated[int | None, Key("Epochs of all trials together; null: any.", ge=1)] = None
    gpu_hours: Annotated[float | None, Key("GPU-hours of the run; null: any.", gt=0)] = None
    time_s: Annotated[
        float | None, Key("Time since the start of the run, such as 2h; null: any.", DURATION)
    ] = None


@dataclass(frozen=True)
class NamedPart:
    """Class of Optuna by name, with the arguments that it is made with."""

    name: Annotated[str, Key("Name of the class.", min_length=1)]
    options: Annotated[
        Mapping[str, Any],
        Key("Its arguments; a mapping of name and options stands for a part inside of another."),
    ] = field(default_factory=dict)


@dataclass(frozen=True)
class PruneRule:
    """Rule that ends a trial within an epoch: the median of other trials at the same point."""

    metric: Annotated[str, Key("Metric that trials report within epochs.", min_length=1)]
    mode: Annotated[
        str | None,
        Key("Direction in which it is better", null="as for stop rules", choices=("max", "min")),
    ] = None
    trials: Annotated[int, Key("Fewest other trials that have come so far.", ge=1)] = 4


USUAL_SAMPLER = NamedPart("TPESampler")
"""Sampler of the method ``optuna`` if the ensemble file names none."""


@dataclass(frozen=True)
class SearchSpec:
    """Search for hyper-parameters.

    Parameters
    ----------
    method : str
        ``grid``, ``random``, ``hyperband``, ``asha``, ``pbt`` or ``optuna``.
    members : tuple of str
        Names of all trials that the search can begin, by number.
    space : mapping
        Distribution by key of the config, as in the ensemble file: ``{"log_uniform": [0.001, 0.1]}``.
    start : tuple of mapping
        Values of the first configs; what they leave out is drawn.
    also : mapping of str to str
        Further metrics, each with its better direction, ``max`` or ``min``.
    epochs : int
        Most epochs of a trial.
    settings : mapping
        Settings of the method, as in the ensemble file.
    sampler, pruner : NamedPart or None
        Optuna's sampler of new configs, and its pruner; None: random draws or a grid, and no pruner.
    prune : PruneRule or None
        Rule that ends trials within an epoch; None: none is ended there.
    parallel : int or None
        Most trials at a time; None: as many as fit the GPUs of a job.
    """

    method: str
    members: tuple[str, ...]
    space: Mapping[str, Mapping[str, Any]]
    epochs: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    sampler: NamedPart | None = None
    pruner: NamedPart | None = None
    prune: PruneRule | None = None
    start: tuple[Mapping[str, Any], ...] = ()
    also: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    parallel: int | None = None
    budget: SearchBudget = field(default_factory=SearchBudget)

    @property
    def configs_are_known(self) -> bool:
        """True if the config of each trial is known before the run."""
        return self.sampler is None and self.method != "pbt"


@dataclass(frozen=True)
class SearchOutcome:
    """Size of a simulated search.

    Parameters
    ----------
    epochs : int
        Epochs of all trials together.
    finished : int
        Trials that had all epochs.
    """

    method: str
    trials: int
    epochs: int
    finished: int


@dataclass(frozen=True)
class Parent:
    """Trial from whose weights another trial starts, and the epochs of its training."""

    trial: int
    epochs: int


@dataclass(frozen=True)
class Trial:
    """A configuration to be trained up to a total number of epochs.

    Parameters
    ----------
    number : int
        Number of the trial, from 0. The same number with more epochs continues the trial.
    epochs : int
        Total epochs at the end, including its parent's.
    parent : Parent or None
        Origin of the initial weights; None for new weights.
    """

    number: int
    config: Mapping[str, Any]
    epochs: int
    parent: Parent | None = None


@dataclass(frozen=True)
class TrialStatus:
    """Trial of a search.

    Parameters
    ----------
    state : str
        State of the member, as in `MemberStatus`.
    epochs, asked : int
        Finished and requested epochs, those of its parent included.
    best, last : float or None
        Best and newest value of the search's metric; None before the first epoch.
    parent : str or None
        Member whose checkpoint it began with.
    also : mapping of str to float
        Newest values of the search's further metrics.
    on_front : bool
        True if no trial has better newest values of all metrics of a search with several.
    """

    number: int
    member: str
    state: str
    config: Mapping[str, Any]
    epochs: int
    asked: int
    best: float | None
    last: float | None
    parent: str | None = None
    also: Mapping[str, float] = field(default_factory=dict)
    on_front: bool = False


@dataclass(frozen=True)
class SearchStatus:
    """Search of a run.

    Parameters
    ----------
    mode : str
        ``max`` if more of the metric is better, ``min`` if less is.
    max_trials : int
        Most trials that it ever begins.
    ended : str or None
        Reason why it asks for no more trials; None if it may ask.
    trials : tuple of TrialStatus
        Trials that it has asked for, the best first.
    importance : mapping of str to float
        Importance of each key of the configs for the metric, as shares, the largest first; empty with too few
        trials or without Optuna.
    also : mapping of str to str
        Its further metrics, each with its better direction.
    """

    run: str
    method: str
    metric: str
    mode: str
    max_trials: int
    ended: str | None
    trials: tuple[TrialStatus, ...]
    importance: Mapping[str, float] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)

    @property
    def measured(self) -> tuple[TrialStatus, ...]:
        """Trials that have a finite value of the metric, the best first."""
        return tuple(trial for trial in self.trials if trial.best is not None and math.isfinite(trial.best))

    @property
    def varied_keys(self) -> tuple[str, ...]:
        """Keys that the configs of all measured trials have, with values that differ."""
        configs = [trial.config for trial in self.measured]
        shared = [key for key in (configs[0] if configs else ()) if all(key in config for config in configs)]
        return tuple(key for key in shared if len({repr(config[key]) for config in configs}) > 1)
