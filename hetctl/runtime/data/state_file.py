"""Files of states between visits: a header in JSON, then the arrays as they are in memory."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNED = 64
"""Bytes to a multiple of which each array begins, so that it can be used where it is mapped."""

Arrays = Mapping[str, npt.NDArray[Any]]


def write_state(path: Path, arrays: Arrays, state: Any) -> int:
    """Write a state, completely or not at all; return the length of the file in bytes.

    Parameters
    ----------
    state : Any
        Values of JSON.
    """
    described, size_bytes = {}, 0
    for name, array in arrays.items():
        described[name] = {"dtype": array.dtype.str, "shape": list(array.shape), "start": size_bytes}
        size_bytes += -(-array.nbytes // ALIGNED) * ALIGNED
    header = json.dumps({"state": state, "arrays": described}).encode()
    # Its own first line has the length of the header.
    header += b" " * (-(len(header) + 21) % ALIGNED)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(b"%020d\n" % len(header) + header)
            for array in arrays.values():
                _write_aligned(file.fileno(), array)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return 21 + len(header) + size_bytes


def read_state(path: Path) -> tuple[dict[str, npt.NDArray[Any]], Any]:
    """Return the arrays of a state, as read-only maps of the file, and its values of JSON."""
    with path.open("rb") as file:
        length = int(file.readline())
        header = json.loads(file.read(length))
    whole = np.memmap(path, np.uint8, "r")
    arrays = {}
    for name, described in header["arrays"].items():
        dtype, shape = np.dtype(described["dtype"]), tuple(described["shape"])
        start = 21 + length + described["start"]
        stop = start + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        arrays[name] = whole[start:stop].view(dtype).reshape(shape)
    return arrays, header["state"]


def _write_aligned(descriptor: int, array: npt.NDArray[Any]) -> None:
    """Write an array and the padding behind it; one write need not take all bytes (write(2))."""
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    data = memoryview(flat)
    while len(data):
        data = data[os.write(descriptor, data) :]
    padding = -array.nbytes % ALIGNED
    if padding:
        os.write(descriptor, bytes(padding))
