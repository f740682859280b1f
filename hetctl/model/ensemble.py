"""What is to be trained: the ensemble and its members."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetctl.model.serialization import encode

RAISABLE = {
    "patience": re.compile(r"no better .+ in (\d+) epochs"),
    "max_epochs": re.compile(r"(\d+) epochs done"),
}
"""Limits of a stop rule, and what the rule says when one of them ends a member."""


@dataclass(frozen=True)
class StopRule:
    """When a member has converged.

    Parameters
    ----------
    metric : str
        A key of the epoch's results, such as ``val_accuracy`` or ``val_loss``.
    mode : str
        ``max`` if more of the metric is better, ``min`` if less is.
    patience : int
        Epochs without an improvement of more than `min_delta` after which the member has converged.
    target : float or None
        The member has converged as soon as the metric reaches this value.
    max_epochs : int
        The member is done after this many epochs in any case.
    expected_epochs : int or None
        How long the author expects it to take; used for predictions only, `max_epochs` if None.
    """

    metric: str = "val_loss"
    mode: str = "min"
    patience: int = 5
    min_delta: float = 0.0
    target: float | None = None
    max_epochs: int = 100
    expected_epochs: int | None = None

    def reason_to_stop(self, history: tuple[float, ...]) -> str | None:
        """Say why a member with this metric per epoch has converged, or None if it has not."""
        if not history:
            return None
        sign = 1.0 if self.mode == "max" else -1.0
        scores = [sign * value for value in history]
        if self.target is not None and scores[-1] >= sign * self.target:
            return f"{self.metric} reached {self.target:g}"
        best, best_epoch = float("-inf"), 0
        for epoch, score in enumerate(scores, start=1):
            if score > best + self.min_delta or best_epoch == 0:
                best, best_epoch = score, epoch
        if len(scores) - best_epoch >= self.patience:
            return f"no better {self.metric} in {self.patience} epochs"
        if len(scores) >= self.max_epochs:
            return f"{self.max_epochs} epochs done"
        return None

    def still_converged(self, reason: str, history: tuple[float, ...]) -> str | None:
        """Say why a member that converged under an earlier rule has converged under this one.

        Only limits that were raised since let a member go on; whatever else it converged by holds.

        Parameters
        ----------
        reason : str
            What `reason_to_stop` of the earlier rule said.
        history : tuple of float
            The metric per epoch.
        """
        return self.reason_to_stop(history) if self._raised_since(reason) else reason

    def _raised_since(self, reason: str) -> bool:
        ended_by = {key: pattern.fullmatch(reason) for key, pattern in RAISABLE.items()}
        return any(found and getattr(self, key) > int(found[1]) for key, found in ended_by.items())

    @property
    def planned_epochs(self) -> int:
        """Epochs that predictions assume for a member that has not started."""
        return min(self.expected_epochs or self.max_epochs, self.max_epochs)


@dataclass(frozen=True)
class Member:
    """One network of the ensemble, with its hyper-parameters.

    Parameters
    ----------
    name : str
        Unique in the ensemble and safe as a file name.
    config : mapping
        Handed to ``model_fn`` and ``train_fn`` as it is.
    batch_size : int
        Samples per GPU and step; a group of k GPUs takes k times as many.
    min_batch_size : int or None
        Out of memory, the batch size may be halved down to this; None: it stays as it is.
    layers : str or None
        Absolute path of a profile of its layers, by which it can be cut into a pipeline.
    max_gpus : int or None
        Never give this member more GPUs; None leaves it to the planner.
    rescale_learning_rate : bool
        Scale the learning rate with the number of GPUs (Capes et al., Equation 7).
    validation_batch_size : int or None
        Samples per GPU and step of an evaluation; None: as many as in training.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    seed: int = 0
    stop: StopRule = field(default_factory=StopRule)
    max_gpus: int | None = None
    rescale_learning_rate: bool = True
    min_batch_size: int | None = None
    layers: str | None = None
    validation_batch_size: int | None = None

    @property
    def rows_evaluated(self) -> int:
        """Samples per GPU and step of an evaluation."""
        return self.validation_batch_size or self.batch_size

    def smaller_batch(self, batch_size: int) -> int | None:
        """Return the batch size to try where `batch_size` ran out of memory; None if there is none."""
        if self.min_batch_size is None or batch_size <= self.min_batch_size:
            return None
        return max(batch_size // 2, self.min_batch_size)

    @property
    def fingerprint(self) -> str:
        """Identify what a measured rate depends on: the network and its batch size."""
        text = json.dumps([encode(self.config), self.batch_size], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Functions:
    """The user's functions as ``module:function``, in CEREBRO's API (section 3, Figure 3)."""

    input_fn: str
    model_fn: str
    train_fn: str | None = None


@dataclass(frozen=True)
class Ensemble:
    """Networks that are trained on the same data.

    Parameters
    ----------
    folder : str
        Absolute folder of the ensemble file; the modules of `functions` lie beside it.
    data : str or None
        Handed to ``input_fn``.
    partitions : int or None
        Parts of the training data that lie on the nodes, each on one; None: it is not partitioned.
    samples_per_epoch : int or None
        Training samples, for members that nobody could profile; None: as profiles say.
    """

    name: str
    framework: str
    functions: Functions
    members: tuple[Member, ...]
    folder: str
    data: str | None = None
    partitions: int | None = None
    samples_per_epoch: int | None = None

    def member(self, name: str) -> Member:
        """Return the member of that name; KeyError if there is none."""
        for member in self.members:
            if member.name == name:
                return member
        raise KeyError(name)
