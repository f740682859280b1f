"""Trials of a run's search with their results, from which tables, CSV and ``--json`` output are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrialStatus:
    """Trial of a search.

    Parameters
    ----------
    state : str
        State of the member, as in `MemberStatus`.
    epochs, asked : int
        Finished epochs, those of its parent included, and those that the search has asked for.
    best, last : float or None
        Best and newest value of the search's metric; None before the first epoch.
    parent : str or None
        Member whose checkpoint it began with.
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


@dataclass(frozen=True)
class SearchStatus:
    """Search of a run.

    Parameters
    ----------
    mode : str
        ``max`` if more of the metric is better, ``min`` if less is.
    most : int
        Most trials that it ever begins.
    ended : str or None
        Reason for which it asks for no more trials; None if it may.
    trials : tuple of TrialStatus
        Trials that it has asked for, the best first.
    importance : mapping of str to float
        Shares of the keys of the configs in what makes a trial good, the largest first; empty if there are
        too few trials, or Optuna is not installed.
    """

    run: str
    method: str
    metric: str
    mode: str
    most: int
    ended: str | None
    trials: tuple[TrialStatus, ...]
    importance: Mapping[str, float] = field(default_factory=dict)

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
