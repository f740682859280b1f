"""A rank's resources that last from one visit to the next: partitions, networks, unwritten states."""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hetctl.model.ensemble import Ensemble, Member, Partitions
from hetctl.model.errors import TransientInputError
from hetctl.model.values import dataclass
from hetctl.runtime.data.partition_folder import path_on_node
from hetctl.runtime.data.partitioned_data import read_partition
from hetctl.runtime.data.sharing.node_folder import node_folder, state_folder
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import TrainableNetwork
from hetctl.runtime.worker.async_checkpoint import StateSaver
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.hardware import Busy, busy_share

NETWORKS_BYTES = 2**30
"""Bytes of the states of all kept networks; on a GPU they take a little more of its memory."""
PARTITIONS_SHARE = 0.5
"""Share of the rank's memory for partitions; the rest is for the framework."""
LEAST_BYTES = 2**28
"""Memory for partitions if the rank's share is not known."""

OpenPartition = tuple[ArraySource, ArraySource]


@dataclass(frozen=True)
class HopResources:
    """Store, partitions, networks, and unwritten states of a rank.

    Parameters
    ----------
    store : Path
        Folder of the node's states.
    busy : callable
        Function for live metrics, which returns the used share of the rank's device.
    """

    store: Path
    partitions: OpenPartitions
    networks: KeptNetworks
    saver: StateSaver
    busy: Busy


def open_hops(context: WorkerContext, run_key: str, ensemble: Ensemble) -> HopResources:
    """Return the resources of all visits of a rank; open them at the first call."""
    if context.kept is None:
        assert ensemble.partitions is not None
        _, functions = context.load_code(ensemble)
        # Garbage collections need not scan objects that stay.
        gc.collect()
        gc.freeze()
        binding = context.binding
        limit_bytes = int(PARTITIONS_SHARE * binding.memory_bytes) or LEAST_BYTES
        context.kept = HopResources(
            store=context.keep.enter_context(node_folder(state_folder(run_key, binding.node))),
            partitions=OpenPartitions(ensemble.partitions, ensemble.data, functions.input_fn, limit_bytes),
            networks=KeptNetworks(NETWORKS_BYTES),
            saver=StateSaver(context.on_unsaved),
            busy=busy_share(binding.device),
        )
        context.keep.callback(context.kept.saver.close)
    context.heartbeat()
    return context.kept


class KeptNetworks:
    """Networks of members; the least recently used one is released first.

    A framework may take seconds to build and trace one.

    Parameters
    ----------
    limit_bytes : int
        Limit of the summed sizes of their states. A network with a larger state is built for each visit.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[str, tuple[tuple[Member, int], TrainableNetwork, int]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of networks."""
        return len(self._kept)

    def pop(self, member: Member, ranks: int) -> TrainableNetwork | None:
        """Remove and return a member's network; None if there is none for its settings.

        Parameters
        ----------
        ranks : int
            Size of the group for which it was built.
        """
        known, network, _ = self._kept.pop(member.name, (None, None, 0))
        return network if known == (member, ranks) else None

    def keep(self, member: Member, ranks: int, network: TrainableNetwork, size_bytes: int) -> None:
        """Keep a network; restore its state before its next use.

        Parameters
        ----------
        ranks : int
            Size of the group for which it was built.
        size_bytes : int
            Size of its state.
        """
        self._kept[member.name] = (member, ranks), network, size_bytes
        while sum(size for _, _, size in self._kept.values()) > self._limit_bytes:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Release all networks."""
        self._kept.clear()


class OpenPartitions:
    """Partitions of this node; the least recently used one is closed first.

    Parameters
    ----------
    limit_bytes : int
        Memory for all open partitions. A larger partition is read for each visit.
    """

    def __init__(
        self, settings: Partitions, data: str | None, input_fn: Callable[..., Any], limit_bytes: int
    ) -> None:
        self._settings, self._data, self._input_fn = settings, data, input_fn
        self._limit_bytes = limit_bytes
        self._open: OrderedDict[int, OpenPartition] = OrderedDict()
        self._largest_bytes = 0

    def open(self, number: int, before_reading: Callable[[], None] = lambda: None) -> OpenPartition:
        """Return the training and the validation samples of a partition.

        Parameters
        ----------
        before_reading : callable
            Function called if the partition has to be read.

        Raises
        ------
        TransientInputError
            If the partition is not on this node, or does not consist of arrays.
        """
        if number not in self._open:
            # Before the reading, so that the limit holds meanwhile, too.
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
            raise TransientInputError(
                f"partition {number} is not on {os.uname().nodename}: there is no {path}",
                "place it there again, or correct `partitions:` in the ensemble file",
            )
        return read_partition(str(path), self._data, self._input_fn)

    def _close_until(self, limit_bytes: int) -> None:
        while self._open and _bytes_of(self._open.values()) > limit_bytes:
            self._open.popitem(last=False)


def _bytes_of(partitions: Any) -> int:
    """Return the memory of partitions; maps of files do not count, since the kernel drops them on demand."""
    owners = {
        id(owner): size
        for partition in partitions
        for source in partition
        for owner, size in map(_owner_of, (source.x, source.y))
    }
    return sum(owners.values())


def _owner_of(array: Any) -> tuple[Any, int]:
    """Return the object that holds an array's memory, and its size in bytes; 0 for the map of a file."""
    while isinstance(getattr(array, "base", None), np.ndarray):
        array = array.base
    return array, 0 if isinstance(array, np.memmap) else int(getattr(array, "nbytes", 0))
