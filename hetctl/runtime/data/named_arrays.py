"""Inputs of several named arrays, such as images and their metadata, and samples of any kind in batches.

Named arrays become one record per sample, with a field for each. Records have one structured NumPy type, so
they are stored, chosen, padded and sent like other inputs; networks get mappings of arrays. For samples of
any kind, the ``collate_fn`` of their dataset makes the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.errors import BadInputError, HetctlError, TransientInputError

Array = npt.NDArray[Any]


class NamedArrays:
    """Rows of several arrays as records, made only for requested rows.

    Parameters
    ----------
    arrays : mapping of str to array
        Arrays with equally many rows, or objects that can be indexed with an array of integers.
    place : str
        Name of the mapping, for messages.

    Raises
    ------
    BadInputError
        If a name is no text, there is no array, or their lengths differ.
    """

    def __init__(self, arrays: Mapping[Any, Any], place: str) -> None:
        _check_names(arrays, place)
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise BadInputError(
                f"arrays of {place} have different lengths: {said}", "return equally many rows"
            )
        self._arrays = dict(arrays)
        self._length = next(iter(lengths.values()))
        first = {name: np.asarray(array[np.arange(min(1, self._length))]) for name, array in arrays.items()}
        self._type = _type_of({name: (rows.dtype, rows.shape[1:]) for name, rows in first.items()})

    @property
    def nbytes(self) -> int:
        """Size in bytes of the arrays in memory, without maps of files."""
        own = (array for array in self._arrays.values() if not isinstance(array, np.memmap))
        return sum(int(getattr(array, "nbytes", 0)) for array in own)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._length

    def __getitem__(self, numbers: Any) -> Array:
        """Return the records with these numbers."""
        chosen = np.asarray(numbers, np.int64)
        records = np.empty(len(chosen), self._type)
        for name, array in self._arrays.items():
            records[name] = np.asarray(array[chosen])
        return records

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return all records."""
        return np.asarray(self[np.arange(self._length)], dtype)


def record_of(values: Mapping[Any, Any], place: str) -> Array:
    """Return the inputs of one sample as a record.

    Raises
    ------
    BadInputError
        If a name is no text, or there is no value; `place` names the sample.
    """
    _check_names(values, place)
    arrays = {name: np.asarray(value) for name, value in values.items()}
    record = np.empty((), _type_of({name: (array.dtype, array.shape) for name, array in arrays.items()}))
    for name, array in arrays.items():
        record[name] = array
    return record


def fields_of(rows: Array) -> Array | dict[str, Array]:
    """Return the fields of records as arrays by name; other arrays as they are."""
    if rows.dtype.names is None:
        return rows
    # Frameworks need contiguous, aligned arrays, and a field of a record is neither.
    return {name: np.require(rows[name], requirements=["C", "A"]) for name in rows.dtype.names}


def refuse_named(rows: Array, reader: str) -> None:
    """Refuse records where a reader takes a single input.

    Raises
    ------
    BadInputError
        If `rows` are records; `reader` names what takes no mappings.
    """
    if rows.dtype.names is not None:
        raise BadInputError(
            f"input_fn returned the inputs {', '.join(rows.dtype.names)}, and {reader} takes one array",
            "return one array x, or train the member without a pipeline",
        )


def _check_names(values: Mapping[Any, Any], place: str) -> None:
    if not values or not all(isinstance(name, str) and name for name in values):
        raise BadInputError(
            f"{place} is a mapping with the keys {list(values)}", "name each array with a text: {'image': ..}"
        )


def _type_of(fields: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> np.dtype[Any]:
    # Unaligned: the bytes of gaps could differ between equal samples, and so could digests of partitions.
    return np.dtype([(name, dtype, shape) for name, (dtype, shape) in fields.items()])


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
        such arrays. The other axes may differ in length between batches.

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
            raise TransientInputError(f"input_fn returned 0 {name} samples")
        self.sample = self.batch([0])

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._dataset)

    def batch(self, numbers: Sequence[int]) -> tuple[Array, Array]:
        """Return x and y of these samples; a mapping x becomes records, as in `NamedArrays`.

        Raises
        ------
        BadInputError
            If the dataset or ``collate_fn`` fails, or the batch does not have a row for each sample.
        """
        listed = ", ".join(map(str, numbers[:SHOWN])) + (", .." if len(numbers) > SHOWN else "")
        place = f"{self._name} samples {listed}"
        with refusing_errors(f"collating {place}", ROWS):
            # PyTorch's DataLoader reads a batch at once by the same method.
            fetch = getattr(self._dataset, "__getitems__", None)
            samples = list(fetch(list(numbers))) if fetch else [self._dataset[number] for number in numbers]
            return rows_of(self._collate_fn(samples), len(numbers), place)


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


@contextmanager
def refusing_errors(doing: str, hint: str = "") -> Iterator[None]:
    """Refuse what fails in code of the user: any error becomes a BadInputError, but for those of hetctl."""
    try:
        yield
    except HetctlError:
        raise
    except Exception as error:
        raise TransientInputError(f"{doing}: {type(error).__name__}: {error}", hint) from error
