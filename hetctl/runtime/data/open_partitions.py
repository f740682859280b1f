"""Partitions that a rank keeps open between visits, as many as fit into its memory."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from hetctl.model.ensemble import Partitions
from hetctl.model.errors import BadInputError
from hetctl.runtime.data.part_files import path_on_node
from hetctl.runtime.data.partitions import read_partition
from hetctl.runtime.data.sources import ArraySource

OpenPartition = tuple[ArraySource, ArraySource]


class OpenPartitions:
    """Partitions of this node; those that have not been used for longest are closed first.

    Parameters
    ----------
    limit_bytes : int
        Memory for all partitions that are kept. One larger than that is read for each visit.
    """

    def __init__(
        self, settings: Partitions, data: str | None, input_fn: Callable[..., Any], limit_bytes: int
    ) -> None:
        self._settings, self._data, self._input_fn = settings, data, input_fn
        self._limit_bytes = limit_bytes
        self._open: OrderedDict[int, OpenPartition] = OrderedDict()
        self._largest_bytes = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the open partitions; the one used last comes last."""
        return tuple(self._open)

    def open(self, number: int, before_reading: Callable[[], None] = lambda: None) -> OpenPartition:
        """Return the training and the validation samples of a partition.

        Parameters
        ----------
        before_reading : callable
            Function called if the partition has to be read.

        Raises
        ------
        BadInputError
            If the partition is not on this node, or does not consist of arrays.
        """
        if number not in self._open:
            # Before it is read, so that the limit also holds while it is.
            self._close_until(self._limit_bytes - self._largest_bytes)
            before_reading()
            self._open[number] = self._read(number)
            self._largest_bytes = max(self._largest_bytes, _bytes_of([self._open[number]]))
        self._open.move_to_end(number)
        opened = self._open[number]
        self._close_until(self._limit_bytes)
        return opened

    def _read(self, number: int) -> OpenPartition:
        path = path_on_node(self._settings.paths()[number])
        if not path.exists():
            raise BadInputError(
                f"partition {number} is not on {os.uname().nodename}: there is no {path}",
                "place it there again, or correct `partitions:` in the ensemble file",
            )
        return read_partition(str(path), self._data, self._input_fn)

    def _close_until(self, limit_bytes: int) -> None:
        while self._open and _bytes_of(self._open.values()) > limit_bytes:
            self._open.popitem(last=False)


def _bytes_of(partitions: Any) -> int:
    """Return the memory of partitions without maps of files, which the kernel drops and reads on demand."""
    owners = {
        id(owner): size
        for partition in partitions
        for source in partition
        for owner, size in map(_owner_of, (source.x, source.y))
    }
    return sum(owners.values())


def _owner_of(array: Any) -> tuple[Any, int]:
    """Return what holds an array's memory, and its size in bytes; 0 for the map of a file."""
    while isinstance(getattr(array, "base", None), np.ndarray):
        array = array.base
    return array, 0 if isinstance(array, np.memmap) else int(getattr(array, "nbytes", 0))
