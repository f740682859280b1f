"""A search for hyper-parameters, as an ensemble file defines it; its trials are members of the ensemble."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TRIAL, REPORT, SEARCH_ENDED = "trial", "trial_report", "search_ended"
"""Kinds of the events of a search, which the driver writes: a trial is asked for, its result, the end."""
OF_SEARCHES = frozenset({TRIAL, REPORT, SEARCH_ENDED})


@dataclass(frozen=True)
class SearchBudget:
    """Limits after which a search begins and continues no more trials; None means no limit.

    Parameters
    ----------
    epochs : int or None
        Epochs of all trials together, as asked for.
    gpu_hours : float or None
        GPU-hours of the run.
    time_s : float or None
        Seconds since the start of the run.
    """

    epochs: int | None = None
    gpu_hours: float | None = None
    time_s: float | None = None


@dataclass(frozen=True)
class NamedPart:
    """Class of Optuna by its name, with the options that it is made with."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchSpec:
    """Search for hyper-parameters.

    Parameters
    ----------
    method : str
        ``grid``, ``random``, ``hyperband``, ``asha``, ``pbt`` or ``optuna``.
    members : tuple of str
        Names of the trials by number; as many as the search can ever begin.
    space : mapping
        Distribution by key of the config, as in the ensemble file: ``{"log_uniform": [0.001, 0.1]}``.
    epochs : int
        Most epochs of a trial.
    settings : mapping
        Settings of the method, as in the ensemble file.
    sampler, pruner : NamedPart or None
        Optuna's sampler of new configs, and its pruner; None: random draws or a grid, and none.
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
    seed: int = 0
    parallel: int | None = None
    budget: SearchBudget = field(default_factory=SearchBudget)

    @property
    def configs_are_known(self) -> bool:
        """True if the config of each trial is known before the run."""
        return self.sampler is None and self.method != "pbt"
