"""Samples of any kind, of which a function makes batches: a dataset with a ``collate_fn``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.errors import BadInputError, HetctlError
from hetctl.runtime.data.named_arrays import NamedArrays

Array = npt.NDArray[Any]

ROWS = "collate_fn must return (x, y), arrays or tensors with a row a sample; x may be a mapping of those"
SHOWN = 4
"""Most numbers of samples in a message."""


class Collated:
    """A dataset whose samples may be mappings, or of any lengths, with the function that makes batches.

    Parameters
    ----------
    dataset : object
        Dataset with ``__len__`` and ``__getitem__``, such as a map-style ``torch.utils.data.Dataset`` or a
        ``datasets.Dataset`` of Hugging Face. If it has ``__getitems__``, that gets the numbers of a batch.
    collate_fn : callable
        ``collate_fn(samples) -> (x, y)``; `samples` is a list of what the dataset returned. x and y are
        arrays or tensors in the node's memory with a row for each sample; x may be a mapping of names to
        those. The other axes may be of other lengths in each batch.

    Raises
    ------
    BadInputError
        If the dataset has no length or cannot be indexed, or `collate_fn` cannot be called.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise BadInputError(
                f"Collated got {type(dataset).__name__}, whose samples cannot be read by number",
                "give it a dataset with __len__ and __getitem__",
            )
        if not callable(collate_fn):
            raise BadInputError(
                f"collate_fn of Collated is {type(collate_fn).__name__}, not a function",
                "give it a function of a list of samples",
            )
        self.dataset = dataset
        self.collate_fn = collate_fn


class CollatedSource:
    """Batches of a `Collated`, made from the numbers of their samples.

    Parameters
    ----------
    name : str
        Name of the samples, for messages.

    Attributes
    ----------
    sample : tuple of arrays
        A batch with the first sample.

    Raises
    ------
    BadInputError
        If there are no samples, or the first one makes no batch.
    """

    def __init__(self, collated: Collated, name: str) -> None:
        self._dataset = collated.dataset
        self._collate_fn = collated.collate_fn
        self._name = name
        if len(self) == 0:
            raise BadInputError(f"input_fn returned 0 {name} samples")
        self.sample = self.batch([0])

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._dataset)

    def batch(self, numbers: Sequence[int]) -> tuple[Array, Array]:
        """Return x and y of these samples; a mapping x becomes records, as in `NamedArrays`.

        Raises
        ------
        BadInputError
            If the dataset or ``collate_fn`` fails, or the batch has not a row for each sample.
        """
        place = f"{self._name} samples {_listed(numbers)}"
        try:
            return rows_of(self._collate_fn(self._fetched(numbers)), len(numbers), place)
        except HetctlError:
            raise
        except Exception as error:
            raise BadInputError(f"collating {place}: {type(error).__name__}: {error}", ROWS) from error

    def _fetched(self, numbers: Sequence[int]) -> list[Any]:
        # PyTorch's DataLoader reads a batch at once by the same method.
        fetch = getattr(self._dataset, "__getitems__", None)
        return list(fetch(list(numbers))) if fetch else [self._dataset[number] for number in numbers]


def rows_of(batch: Any, samples: int, place: str) -> tuple[Array, Array]:
    """Return a batch as arrays with a row for each sample."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise BadInputError(f"the batch of {place} is {type(batch).__name__}, not a pair (x, y)", ROWS)
    x, y = batch
    if isinstance(y, Mapping):
        raise BadInputError(f"y of {place} is a mapping", ROWS)
    if isinstance(x, Mapping):
        arrays = {name: _checked(value, samples, f"{name} of {place}") for name, value in x.items()}
        rows = np.asarray(NamedArrays(arrays, f"x of {place}"))
    else:
        rows = _checked(x, samples, f"x of {place}")
    return rows, _checked(y, samples, f"y of {place}")


def _checked(values: Any, samples: int, place: str) -> Array:
    array = np.asarray(values)
    if array.dtype.hasobject:
        raise BadInputError(f"{place} is of type {array.dtype}, which has no fixed size", ROWS)
    if array.ndim == 0 or len(array) != samples:
        raise BadInputError(f"{place} has shape {array.shape}, with {samples} samples in the batch", ROWS)
    return array


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:SHOWN])) + (", .." if len(numbers) > SHOWN else "")
