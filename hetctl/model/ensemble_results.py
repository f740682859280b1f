"""Ensembles of trained members: how they are averaged, and what they gain over the best member."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from hetctl.model.values import dataclass

ACCURACY, LOSS, MSE, MAE = "accuracy", "log_loss", "mse", "mae"
"""Metrics of ensembles; all but the accuracy are better if they are smaller."""
BEST_MEMBER, AVERAGE, WEIGHTED, GREEDY = "best member", "average", "weighted", "greedy"
UNIFORM_SOUP, GREEDY_SOUP = "uniform-soup", "greedy-soup"
AVERAGES = (GREEDY, AVERAGE, WEIGHTED)
"""Ways to average predictions, the usual one first."""
SOUPS = (UNIFORM_SOUP, GREEDY_SOUP)
"""Ways to average weights."""


class OutputForm(enum.Enum):
    """Form of a network's outputs."""

    LOGITS = "logits"
    PROBABILITIES = "probabilities"
    VALUES = "values"


@dataclass(frozen=True)
class Gain:
    """Difference of a metric from the best member's, positive if better, and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Combination:
    """Members that are averaged.

    Parameters
    ----------
    way : str
        How: one of `AVERAGES` or `SOUPS`, or the best member alone.
    weights : mapping of str to float
        Weights of the members above 0, which add up to 1, chosen by all samples.
    value : float
        Metric of samples by none of which the members were chosen.
    fitted_value : float
        Metric of all samples, by which the weights above were chosen: too good.
    gain : Gain or None
        Gain of these samples over the best member, chosen in the same way; None for the best member.
    loss, scaled_loss : float or None
        Log-loss of these samples, and after scaling by a temperature; None without classes.
    temperature : float or None
        Temperature by all samples; None without classes.
    """

    way: str
    weights: Mapping[str, float]
    value: float
    fitted_value: float
    gain: Gain | None = None
    loss: float | None = None
    scaled_loss: float | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Candidate:
    """Member whose predictions are there.

    Parameters
    ----------
    epoch : int
        Epoch of its checkpoint and predictions.
    value : float
        Metric of all validation samples.
    """

    member: str
    epoch: int
    value: float


@dataclass(frozen=True)
class EnsembleResult:
    """Ensembles of a run's members.

    Parameters
    ----------
    metric : str
        Metric by which members are chosen.
    samples : int
        Validation samples.
    candidates : tuple of Candidate
        Members to choose from, the best first.
    left_out : mapping of str to str
        Reasons of the others, by name.
    combinations : tuple of Combination
        The best member first.
    path : str or None
        Folder that was written; None: none was.
    """

    run: str
    metric: str
    samples: int
    candidates: tuple[Candidate, ...]
    left_out: Mapping[str, str]
    combinations: tuple[Combination, ...]
    path: str | None = None
