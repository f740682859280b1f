"""Products of a run: weights of a member, bundles to check it elsewhere, ensembles of members."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from hetctl.model.ensemble import Member
from hetctl.model.training_progress import EpochResult
from hetctl.model.values import dataclass

BEST, LAST = "best", "last"
"""Epochs that may be asked for in place of a number."""


@dataclass(frozen=True)
class Exported:
    """A file or folder with the weights of a member.

    Parameters
    ----------
    path : str
        The file or, of a command whose checkpoint is a folder, the folder.
    epoch : int
        Number of the epoch.
    best_epoch : int or None
        Best epoch whose checkpoint is kept.
    kept : tuple of int
        Epochs whose checkpoints are kept.
    bytes : int
        Size.
    note : str
        What has to be known to load it; empty if nothing has.
    history : sequence of EpochResult
        Finished epochs of the member.
    framework, data, functions
        Framework, argument of ``input_fn``, and functions by their names in the ensemble file.
    code : str
        Digest of the user's modules; empty for commands.
    revision : str
        Revision of the ensemble's folder when the run was submitted, as Git describes it; empty: not known.
    versions : mapping of str to str
        Versions of the packages by which it was written.
    """

    run: str
    member: Member
    path: str
    epoch: int
    best_epoch: int | None
    kept: tuple[int, ...]
    bytes: int
    note: str
    history: Sequence[EpochResult]
    framework: str
    data: str | None
    functions: Mapping[str, str]
    code: str
    revision: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class DataFile:
    """File of the training data: its size in bytes and, unless it is left out, its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str | None


@dataclass(frozen=True)
class Origin:
    """Origin of a run's results besides its specification and code.

    Parameters
    ----------
    revision : str
        Revision of the ensemble's folder, as Git describes it; empty: none.
    data : mapping of str to DataFile
        Files of the training data by path, relative to the ensemble's folder if they are in it.
    versions : mapping of str to str
        Versions of Python and of installed packages.
    """

    revision: str
    data: Mapping[str, DataFile]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Bundled:
    """Bundle of a run: its path, its files, and their size together in bytes."""

    run: str
    path: str
    files: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class BundleDifference:
    """Value in a bundle, and the one found here; None: there is none."""

    what: str
    bundled: str | None
    here: str | None


@dataclass(frozen=True)
class BundleCheck:
    """Comparison of a bundle with its own digests, and with the code, data and packages found here."""

    run: str
    compared: int
    differences: tuple[BundleDifference, ...]


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
