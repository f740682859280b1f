"""Arrays of h5py and zarr, which stay on the disk: rows are read chunk by chunk, in the order of the file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.errors import BadInputError

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]

PACKAGES = frozenset({"h5py", "zarr"})


class DiskArray:
    """An array of h5py or zarr that is indexed with an array of integers, in any order.

    h5py takes increasing numbers only, and selects them one by one. Here each chunk of the file that has some
    of the rows is read once: a compressed one has to be decompressed whole in any case.

    Parameters
    ----------
    array : h5py.Dataset or zarr.Array
        The open array; its first axis is that of the samples.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        chunks = array.chunks
        # Rows of an array without chunks are read on their own, unless they are neighbours.
        self._chunk_rows = int(chunks[0]) if chunks else 0

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._array.shape[0])

    def __getitem__(self, numbers: npt.ArrayLike) -> Array:
        """Return a row for each number, in the order of the numbers."""
        wanted, places = np.unique(np.asarray(numbers), return_inverse=True)
        rows = np.empty((len(wanted), *self._array.shape[1:]), self._array.dtype)
        for first, stop in _runs(wanted, self._chunk_rows):
            start, end = int(wanted[first]), int(wanted[stop - 1]) + 1
            rows[first:stop] = np.asarray(self._array[start:end])[wanted[first:stop] - start]
        chosen: Array = rows[places]
        return chosen

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return all rows, read into memory."""
        return np.asarray(self._array[:], dtype)


def is_on_disk(value: Any) -> bool:
    """Return true for an array of h5py or zarr; neither is imported for it."""
    package = type(value).__module__.partition(".")[0]
    return package in PACKAGES and hasattr(value, "chunks")


def check_open(value: Any, name: str) -> None:
    """Reject an array whose file was closed.

    Parameters
    ----------
    name : str
        Name of the part of the samples, for the message.

    Raises
    ------
    BadInputError
        If it was: only h5py's tell it, by their truth value.
    """
    if type(value).__module__.startswith("h5py") and not value:
        raise BadInputError(
            f"input_fn returned an h5py dataset for {name} whose file is closed",
            "leave the file open: rows are read from it as long as members train",
        )


def _runs(wanted: Numbers, chunk_rows: int) -> Iterator[tuple[int, int]]:
    """Yield first and last index plus one of increasing numbers that are read together."""
    if not len(wanted):
        return
    apart = np.diff(wanted // chunk_rows) > 0 if chunk_rows else np.diff(wanted) > 1
    ends = [0, *(np.flatnonzero(apart) + 1).tolist(), len(wanted)]
    yield from pairwise(ends)
