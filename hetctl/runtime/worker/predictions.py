"""Outputs of a network for the validation samples, with their targets, gathered from all ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

Batch = tuple[Any, Any]
"""Outputs and targets, with as many rows as samples; outputs may be a mapping or a tuple of arrays."""
Share = Sequence[Batch | None]
"""A rank's batches; None for a chunk of which it has no sample."""


class Predictions:
    """Outputs and targets of this rank's validation samples in one evaluation.

    Parameters
    ----------
    arrays_of : callable
        Function that returns the outputs of a batch as arrays.
    at_once : bool
        Convert the outputs of each batch at once, because the device has no memory for all, or uses it again.

    Attributes
    ----------
    samples : int
        Validation samples of the group.
    most_bytes : float
        Bytes of all samples above which none are kept; 0: none are.
    """

    def __init__(self, arrays_of: Callable[[Any], Any], *, at_once: bool) -> None:
        self._arrays_of, self._at_once = arrays_of, at_once
        self.samples, self.most_bytes = 0, 0.0
        self._share: list[Batch | None] | None = None

    def begin(self) -> None:
        """Forget the last evaluation: another one begins."""
        self._share = [] if self.most_bytes else None

    def add(self, outputs: Any, targets: Any) -> None:
        """Add a batch; the memory of the targets may be used again."""
        if self._share is None:
            return
        rows = np.array(targets)
        if not any(self._share):
            size = _bytes_of((self._arrays_of(outputs), rows))
            if self.samples * size > self.most_bytes * len(rows):
                self._share = None
                return
        self._share.append((self._arrays_of(outputs) if self._at_once else outputs, rows))

    def skip(self) -> None:
        """Note that this rank has no sample of a chunk."""
        if self._share is not None:
            self._share.append(None)

    def taken(self) -> Share | None:
        """Return this rank's batches, once; None if they were too large, or none were to be kept."""
        share, self._share = self._share, None
        if share is None or self._at_once:
            return share
        return [batch and (self._arrays_of(batch[0]), batch[1]) for batch in share]


def joined(shares: Sequence[Share]) -> Batch:
    """Return the rows of all ranks in the order of the samples.

    Raises
    ------
    ValueError
        If the shapes of rows differ between batches.
    """
    # Each chunk of samples is divided among the ranks in order.
    batches = [batch for chunk in zip_longest(*shares) for batch in chunk if batch is not None]
    outputs, targets = _rows_of(batches)
    return outputs, targets


def lone_array(outputs: Any) -> Any:
    """Return the only array of outputs, or the one named ``logits``; None if there are several others."""
    while isinstance(outputs, Mapping | tuple | list):
        if isinstance(outputs, Mapping) and "logits" in outputs:
            return outputs["logits"]
        if len(outputs) != 1:
            return None
        (outputs,) = outputs.values() if isinstance(outputs, Mapping) else outputs
    return outputs


def _rows_of(parts: Sequence[Any]) -> Any:
    """Return the rows of all parts, which share one structure."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _rows_of([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_rows_of(pieces) for pieces in zip(*parts, strict=True))
    return np.concatenate(parts)


def _bytes_of(value: Any) -> int:
    return sum(array.nbytes for array in _arrays_in(value))


def _arrays_in(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for part in value:
            yield from _arrays_in(part)
    else:
        yield value
