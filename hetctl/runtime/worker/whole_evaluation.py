"""Metrics of all validation samples at once, from the predictions of all ranks in order of the samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from hetctl.model.errors import BadInputError

Batch = tuple[Any, Any]
"""Outputs and targets, with as many rows as samples; outputs may be a mapping or a tuple of arrays."""
Share = Sequence[Batch | None]
"""A rank's batches; None where it has no sample of a chunk."""


class WholeEvaluation:
    """Predictions of this rank, and the metrics that ``evaluate_fn`` computes of those of all ranks.

    Parameters
    ----------
    evaluate_fn : callable
        Function of outputs, targets and config that returns metrics by name.
    """

    def __init__(self, evaluate_fn: Callable[..., Any], config: Mapping[str, Any]) -> None:
        self._evaluate_fn = evaluate_fn
        self._config = config
        self._share: list[Batch | None] = []

    def add(self, outputs: Any, targets: Any) -> None:
        """Add a batch; the memory of the targets may be used again."""
        self._share.append((outputs, np.array(targets)))

    def skip(self) -> None:
        """Note that this rank has no sample of a chunk."""
        self._share.append(None)

    def taken(self) -> Share:
        """Return this rank's batches since the last call."""
        share, self._share = self._share, []
        return share

    def metrics(self, shares: Sequence[Share], others: Collection[str]) -> dict[str, float]:
        """Return the ``val_*`` metrics of the batches of all ranks.

        Parameters
        ----------
        others : collection of str
            Names that metrics of ``model_fn`` have.

        Raises
        ------
        BadInputError
            If ``evaluate_fn`` returns anything but numbers by name, or a name that is taken; or if batches
            have rows of other shapes than others.
        """
        # Each chunk of samples is divided among the ranks in order.
        batches = [batch for chunk in zip_longest(*shares) for batch in chunk if batch is not None]
        try:
            outputs, targets = _joined(batches)
        except ValueError as error:
            raise BadInputError(
                f"batches of validation samples have outputs or targets of several shapes: {error}",
                "pad all to one length in collate_fn, or use metrics of model_fn instead of evaluate_fn",
            ) from None
        returned = self._evaluate_fn(outputs, targets, dict(self._config))
        if not isinstance(returned, Mapping):
            raise _not_metrics(f"{type(returned).__name__} instead of a mapping")
        try:
            found = {f"val_{name}": float(value) for name, value in returned.items()}
        except (TypeError, ValueError) as error:
            raise _not_metrics(f"{returned!r}: {error}") from None
        if both := sorted(found.keys() & set(others)):
            raise _not_metrics(f"{', '.join(both)}, which model_fn has as well")
        return found


def _joined(parts: Sequence[Any]) -> Any:
    """Return the rows of all parts, which have one structure."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_joined(pieces) for pieces in zip(*parts, strict=True))
    return np.concatenate(parts)


def _not_metrics(problem: str) -> BadInputError:
    return BadInputError(
        f"evaluate_fn returned {problem}", 'return a mapping of names to numbers, such as {"auc": 0.93}'
    )
