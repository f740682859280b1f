"""A rank's resources that last from one visit to the next: partitions, networks, unwritten states."""

from __future__ import annotations

import gc
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from hetctl.model.ensemble import Ensemble, Member, Partitions
from hetctl.model.errors import BadInputError
from hetctl.model.values import dataclass
from hetctl.runtime.data.partition_folder import path_on_node
from hetctl.runtime.data.partitioned_data import read_partition
from hetctl.runtime.data.sharing.node_folder import node_folder, state_folder
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import TrainableNetwork
from hetctl.runtime.worker.async_checkpoint import OnSaved
from hetctl.runtime.worker.checkpoint import Arrays, CheckpointFolder, TrainingState
from hetctl.runtime.worker.context import SavingFailure, WorkerContext
from hetctl.runtime.worker.hardware import Busy, busy_share
from hetctl.storage.event_files import EventWriter

NETWORKS_BYTES = 2**30
"""Bytes of the states of all kept networks; on a GPU they take a little more of its memory."""
PARTITIONS_SHARE = 0.5
"""Share of the rank's memory for partitions; the rest is for the framework."""
LEAST_BYTES = 2**28
"""Memory for partitions if the rank's share is not known."""

Settings = tuple[Member, int]
"""Member, and size of the group for which its network was built."""

OpenPartition = tuple[ArraySource, ArraySource]

MAX_UNSAVED_STATES = 3
"""Most states that may wait: they occupy the node's memory until they are written."""
POLL_S = 0.1
"""Seconds between two heartbeats of a rank that waits for the writing of a state."""


@dataclass(frozen=True)
class HopResources:
    """Store, partitions, networks, and unwritten states of a rank; its `KeptResources`.

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

    @property
    def has_networks(self) -> bool:
        """True if networks are kept for their next visits."""
        return len(self.networks) > 0

    @property
    def has_unsaved(self) -> bool:
        """True if the state of a visit is not in a checkpoint yet."""
        return self.saver.is_busy

    def release_networks(self) -> None:
        """Release the networks that are kept."""
        self.networks.clear()

    def finish_saving(self) -> SavingFailure | None:
        """Wait until the states of all visits are in checkpoints; return the first failure."""
        self.saver.finish()
        return self.saver.failure


def open_hops(context: WorkerContext, run_key: str, ensemble: Ensemble) -> HopResources:
    """Return the resources of all visits of a rank; open them at the first call."""
    if not isinstance(context.kept, HopResources):
        context.kept = _open(context, run_key, ensemble)
    context.heartbeat()
    return context.kept


def _open(context: WorkerContext, run_key: str, ensemble: Ensemble) -> HopResources:
    assert ensemble.partitions is not None
    _, functions = context.load_code(ensemble)
    # Garbage collections need not scan objects that stay.
    gc.collect()
    gc.freeze()
    binding, saver = context.binding, StateSaver(context.on_unsaved)
    limit_bytes = memory_for_partitions(binding.memory_bytes)
    resources = HopResources(
        store=context.keep.enter_context(node_folder(state_folder(run_key, binding.node))),
        partitions=OpenPartitions(ensemble.partitions, ensemble.data, functions.input_fn, limit_bytes),
        networks=KeptNetworks(NETWORKS_BYTES),
        saver=saver,
        busy=busy_share(binding.device),
    )
    context.keep.callback(saver.close)
    return resources


def memory_for_partitions(memory_bytes: int) -> int:
    """Return the bytes that a rank with so much memory has for open partitions; 0: its share is unknown."""
    return int(PARTITIONS_SHARE * memory_bytes) or LEAST_BYTES


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
        self._kept: OrderedDict[str, tuple[Settings, TrainableNetwork, int]] = OrderedDict()

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
        self._kept.move_to_end(member.name)
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
            raise BadInputError(
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


@dataclass(frozen=True)
class UnsavedState:
    """A state on its way into a checkpoint.

    Parameters
    ----------
    arrays : Arrays
        Arrays that stay unchanged until they are written, such as those of a mapped file.
    since : int or None
        Same as in `CheckpointFolder.save`.
    report : callable
        Function called in the saver's thread after the checkpoint is written.
    events : EventWriter
        Events of the member: the rank may have no task when it fails.
    """

    folder: CheckpointFolder
    arrays: Arrays
    state: TrainingState
    since: int | None
    report: OnSaved
    events: EventWriter


class StateSaver:
    """Thread that writes states one after another, after their members have hopped on.

    Parameters
    ----------
    on_failure : callable
        Function called in the thread after a state could not be written.

    Attributes
    ----------
    failure : SavingFailure or None
        The first failure.
    """

    def __init__(self, on_failure: Callable[[], None] = lambda: None) -> None:
        self.failure: SavingFailure | None = None
        self._on_failure = on_failure
        self._pool = ThreadPoolExecutor(1, "states")
        self._waiting: deque[Future[None]] = deque()

    @property
    def is_busy(self) -> bool:
        """True if a state is still to be written."""
        return any(not future.done() for future in self._waiting)

    def save(self, unsaved: UnsavedState, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Have a state written after the earlier ones; block while too many wait.

        Parameters
        ----------
        heartbeat : callable
            Function called repeatedly while it blocks.

        Raises
        ------
        Exception
            The error of an earlier state that could not be written.
        """
        self.check()
        self._waiting.append(self._pool.submit(self._write, unsaved))
        while len(self._waiting) > MAX_UNSAVED_STATES:
            if wait([self._waiting[0]], POLL_S).done:
                self._waiting.popleft()
            heartbeat()

    def check(self) -> None:
        """Raise the error of a state that could not be written; do not wait for one."""
        if self.failure is not None:
            raise self.failure.error

    def finish(self) -> None:
        """Wait until all states are written, or have failed."""
        wait(self._waiting)

    def close(self) -> None:
        """Wait as `finish` does, and end the thread."""
        self._pool.shutdown()

    def _write(self, unsaved: UnsavedState) -> None:
        if self.failure is not None:
            return
        try:
            began = time.perf_counter()
            manifest = unsaved.folder.save(unsaved.arrays, unsaved.state, unsaved.since)
            unsaved.report(manifest, time.perf_counter() - began)
        except Exception as error:
            self.failure = SavingFailure(error, unsaved.events)
            self._on_failure()
