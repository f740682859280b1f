"""Trials of a run's search with their results, from which tables, CSV and ``--json`` output are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    """

    run: str
    method: str
    metric: str
    mode: str
    most: int
    ended: str | None
    trials: tuple[TrialStatus, ...]
