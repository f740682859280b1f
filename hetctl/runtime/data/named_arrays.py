"""Inputs of several named arrays, such as images and their metadata: one record with a field each per sample.

Records are arrays of one structured type of NumPy, so that they can be stored, chosen, padded and sent as
other inputs are; networks get mappings of arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.errors import BadInputError

Array = npt.NDArray[Any]


class NamedArrays:
    """Rows of several arrays as records; only the rows that are asked for are put together.

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
    # A field lies between others in memory, at any address, which frameworks do not take.
    return {name: np.require(rows[name], requirements=["C", "A"]) for name in rows.dtype.names}


def refuse_named(rows: Array, reader: str) -> None:
    """Refuse records where only a single input can be.

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
    # Without gaps for alignment, whose bytes would differ where samples are equal: partitions have digests.
    return np.dtype([(name, dtype, shape) for name, (dtype, shape) in fields.items()])
