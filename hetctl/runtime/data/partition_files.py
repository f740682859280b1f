"""The files of partitions: NumPy archives."""

from __future__ import annotations

import hashlib
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from hetctl.model.errors import BadInputError, TransientInputError
from hetctl.model.hops import PartitionFile
from hetctl.runtime.data.partition_folder import partition_path
from hetctl.storage.atomic_io import private_file

Array = npt.NDArray[Any]

ARRAYS = ("x", "y", "x_validation", "y_validation")
NAME_LENGTHS_AT, LOCAL_HEADER = 26, 30
"""Bytes from the start of a zip entry to the lengths of its name and extra field, and to the name."""
NPY: Any = np.lib.format
ARRAY_HEADERS = {(1, 0): NPY.read_array_header_1_0, (2, 0): NPY.read_array_header_2_0}


def read(path: str | os.PathLike[str]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return the training and the validation samples of a partition.

    Parameters
    ----------
    path : path
        A file of ``hetctl partition``, or of ``numpy.savez`` with the same arrays.

    Returns
    -------
    pair of pairs of arrays
        ``(x, y), (x_validation, y_validation)``, each with a row for each sample. The arrays are read-only
        maps of the file, so that only rows in use are read; compressed ones are read into memory.

    Raises
    ------
    BadInputError
        If the file is no such archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            x, y, x_validation, y_validation = (_array(archive, f"{name}.npy") for name in ARRAYS)
    except OSError as error:
        raise TransientInputError(f"the partition {path} cannot be read: {error.strerror or error}") from None
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise TransientInputError(
            f"{path} is not a partition: {error.args[0]}",
            f"it must be a NumPy archive of the arrays {', '.join(ARRAYS)}; `hetctl partition` writes such",
        ) from None
    return (x, y), (x_validation, y_validation)


def write(file: IO[bytes], arrays: Mapping[str, Array]) -> None:
    """Write a partition; equal arrays give equal bytes.

    Parameters
    ----------
    file : binary file
        Open file, which need not be seekable.
    arrays : mapping
        Arrays by their names, `ARRAYS`.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in ARRAYS:
            # A ZipInfo of its own has a fixed date, unlike that of numpy.savez.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                NPY.write_array(entry, arrays[name], allow_pickle=False)


class Digested:
    """Binary file that counts and digests all writes, and may pass them on to another file."""

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.bytes = 0

    @property
    def sha256(self) -> str:
        """Digest of all that was written."""
        return self._digest.hexdigest()

    def write(self, data: Any) -> int:
        """Take bytes; return their number."""
        self._digest.update(data)
        self.bytes += memoryview(data).nbytes
        if self._file is not None:
            self._file.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Do nothing: nothing is held back."""


def described(arrays: Mapping[str, Array]) -> PartitionFile:
    """Return the manifest's entry for a partition with these arrays; nothing is written."""
    digested = Digested()
    write(digested, arrays)  # type: ignore[arg-type]
    samples, validation = len(arrays["x"]), len(arrays["x_validation"])
    return PartitionFile(samples, validation, digested.bytes, digested.sha256)


def write_partition(folder: Path, number: int, arrays: Mapping[str, Array], partition: PartitionFile) -> None:
    """Write a partition, completely or not at all.

    Raises
    ------
    BadInputError
        If the arrays are not those of the manifest.
    """
    with private_file(partition_path(folder, number)) as file:
        digested = Digested(file)
        write(digested, arrays)  # type: ignore[arg-type]
        if digested.sha256 != partition.sha256:
            raise BadInputError(
                f"the samples of partition {number} were others when they were read again",
                "input_fn must return the same samples every time",
            )


def _array(archive: zipfile.ZipFile, name: str) -> Array:
    entry = archive.getinfo(name)
    with archive.open(entry) as content:
        read_header = ARRAY_HEADERS.get(NPY.read_magic(content))
        shape, is_fortran, dtype = read_header(content) if read_header else ((), False, np.dtype("O"))
        start = content.tell()
    is_plain = not dtype.hasobject and 0 not in (*shape, dtype.itemsize)
    if is_plain and entry.compress_type == zipfile.ZIP_STORED:
        path, header = Path(str(archive.filename)), entry.header_offset
        with path.open("rb") as file:
            # Only the local header tells where the content begins.
            file.seek(header + NAME_LENGTHS_AT)
            lengths: tuple[int, int] = struct.unpack("<HH", file.read(4))
        start += header + LOCAL_HEADER + sum(lengths)
        return np.memmap(path, dtype, "r", start, shape, "F" if is_fortran else "C")
    with archive.open(entry) as content:
        whole: Array = NPY.read_array(content, allow_pickle=False)
    return whole
