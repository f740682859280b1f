"""States of members that hop: a file with all arrays of a network, which other processes map into memory.

It begins with `MAGIC` and the length of a header in JSON, which describes the arrays that follow. They are
stored as in memory, each at a multiple of `ALIGNMENT`.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.serialization import encode, parse
from hetctl.model.values import dataclass
from hetctl.runtime.worker.checkpoint import Arrays, TrainingState
from hetctl.storage.atomic_io import draft

MAGIC = b"hetctl state 2\n\0"
LENGTH = struct.Struct("<Q")
ALIGNMENT = 64
"""Bytes; a cache line, and what the vector instructions of frameworks need."""
BUFFER_BYTES = 2**20
"""Arrays that are smaller are written together."""


@dataclass(frozen=True)
class StoredArray:
    """An array of the file.

    Parameters
    ----------
    dtype : str
        Type, as `numpy.dtype` takes it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StateHeader:
    """Header of the file, with its arrays in their order."""

    state: TrainingState
    arrays: tuple[StoredArray, ...]


def write(folder: Path, name: str, arrays: Arrays, state: TrainingState) -> int:
    """Write a state, which gets its name when it is complete; return its size in bytes.

    The file is not synchronized to a disk: it is lost with its node in any case.

    Raises
    ------
    ValueError
        If an array does not consist of numbers or fixed-size text.
    OSError
        If there is no room for it.
    """
    rows = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    stored = tuple(StoredArray(name, _text_of(row.dtype, name), row.shape) for name, row in rows.items())
    header = json.dumps(encode(StateHeader(state, stored))).encode()
    header = MAGIC + LENGTH.pack(len(header)) + header
    # Its dot keeps other nodes from getting an incomplete file.
    with draft(folder / name) as temporary:
        with temporary.open("wb", buffering=BUFFER_BYTES) as file:
            file.write(header)
            for array in rows.values():
                file.write(bytes(-file.tell() % ALIGNMENT))
                file.write(array.reshape(-1).view(np.uint8).data)
            size_bytes = file.tell()
        temporary.chmod(0o600)
        temporary.replace(folder / name)
    return size_bytes


def read(folder: Path, name: str) -> tuple[dict[str, npt.NDArray[Any]], TrainingState]:
    """Map a state into memory; return its read-only arrays, in place, and its training state.

    Raises
    ------
    FileNotFoundError
        If there is no state of this name.
    ValueError
        If the file is no state, or not complete.
    """
    content = np.memmap(folder / name, np.uint8, "r")
    begin = len(MAGIC) + LENGTH.size
    if content[: len(MAGIC)].tobytes() != MAGIC or len(content) < begin:
        raise ValueError(f"{name} is no state of a member")
    (length,) = LENGTH.unpack(content[len(MAGIC) : begin].tobytes())
    header, end = parse(StateHeader, content[begin : begin + length].tobytes()), begin + length
    arrays = {}
    for array in header.arrays:
        dtype, start = np.dtype(array.dtype), end + -end % ALIGNMENT
        end = start + math.prod(array.shape) * dtype.itemsize
        if len(content) < end:
            raise ValueError(f"state {name} has {len(content)} bytes of at least {end}")
        arrays[array.name] = content[start:end].view(dtype).reshape(array.shape)
    return arrays, header.state


def _text_of(dtype: np.dtype[Any], name: str) -> str:
    if dtype.hasobject or dtype.names or dtype.itemsize == 0:
        raise ValueError(f"{name} is of type {dtype}, which no state can contain")
    # Types that are not NumPy's own, such as bfloat16, have a name, but no code.
    return dtype.name if dtype.kind == "V" else dtype.str
