"""Training data in partitions on the nodes' own disks: the holders of samples, and their batches.

Samples migrate between the ranks during an epoch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from hetctl.model.ensemble import Member, Partitions
from hetctl.model.errors import BadInputError, TransientInputError
from hetctl.model.serialization import decode, encode
from hetctl.model.site import NetworkInterfaces, Timeouts
from hetctl.model.values import dataclass
from hetctl.runtime.data.loaders import ArrayLoader, Batch, Loader, Samples, StreamLoader
from hetctl.runtime.data.partition_folder import path_on_node
from hetctl.runtime.data.sample_accesses import Numbers, SampleAccesses, Transfer
from hetctl.runtime.data.sampler import UNSHUFFLED, Stream, parts_of, streams_of
from hetctl.runtime.data.sources import Array, ArraySource, SampleSpec, as_sources
from hetctl.runtime.interfaces import control_address
from hetctl.runtime.transport import Address, Listener, connect
from hetctl.runtime.worker.group import Group, LostPeerError, RankInfo, all_gather


class HeldSamples:
    """Arrays of the samples that a rank holds, by the samples' numbers."""

    def __init__(self, samples: int) -> None:
        self._blocks: list[Samples] = []
        self._block = np.full(samples, -1, np.int32)
        self._row = np.zeros(samples, np.int64)

    def add(self, numbers: Numbers, samples: Samples) -> None:
        """Hold more samples."""
        self._block[numbers] = len(self._blocks)
        self._row[numbers] = np.arange(len(numbers))
        self._blocks.append(samples)

    def drop(self, numbers: Numbers) -> None:
        """Give samples up; memory is released once all samples that arrived together are gone."""
        self._block[numbers] = -1
        for index in set(range(len(self._blocks))).difference(np.unique(self._block).tolist()):
            x, y = self._blocks[index]
            self._blocks[index] = x[:0], y[:0]

    def copy(self, numbers: Numbers) -> Samples:
        """Return copies of some samples."""
        blocks, rows = self._block[numbers], self._row[numbers]
        used = np.unique(blocks).tolist()
        assert used[0] >= 0, "samples of another rank"
        if len(used) == 1:
            x, y = self._blocks[used[0]]
            return x[rows], y[rows]
        x, y = (np.empty((len(numbers), *array.shape[1:]), array.dtype) for array in self._blocks[used[0]])
        for index in used:
            at = blocks == index
            x[at], y[at] = (array[rows[at]] for array in self._blocks[index])
        return x, y


class PartitionLoader(StreamLoader):
    """A rank's batches from partitioned data: copies of samples that it holds.

    An epoch has as many samples as all partitions together. While samples migrate, an epoch may access a few
    of them twice, and others not at all.

    Parameters
    ----------
    samples : Samples
        Samples of this rank's partitions, in the order of the partitions.
    accesses : SampleAccesses
        Accesses of all ranks' samples.

    Attributes
    ----------
    on_landed : callable
        Function called with each transfer whose samples have changed their holder.
    """

    def __init__(
        self, stream: Stream, samples: Samples, accesses: SampleAccesses, exchange: SampleExchange
    ) -> None:
        super().__init__((samples[0][[0]], samples[1][[0]]), stream)
        self.accesses = accesses
        self.on_landed: Callable[[Transfer], None] = lambda _: None
        self._exchange = exchange
        self._held = HeldSamples(self.samples)
        self._held.add(np.flatnonzero(accesses.home == stream.rank), samples)
        self._is_settled = False

    def close(self) -> None:
        """Close the connections to other ranks."""
        self._exchange.close()

    def _next(self) -> Batch:
        if not self._is_settled:
            self._settle()
        chunk, sizes = self._running.at(self._position), self._running.split
        samples, changes = self.accesses.draw(sizes, parts_of(chunk.stop - chunk.start, sizes))
        for transfer, has_landed in changes:
            self._land(transfer) if has_landed else self._send(transfer)
        own = samples[self._stream.rank]
        return self._held.copy(own) if len(own) else self.sample, replace(chunk, numbers=own)

    def _settle(self) -> None:
        """Bring the samples to the ranks that held them in the restored state, once."""
        self._is_settled = True
        away = self.accesses.away()
        for transfer in away:
            self._send(transfer)
        for transfer in away:
            self._land(transfer)
        for transfer in self.accesses.pending:
            self._send(transfer)

    def _send(self, transfer: Transfer) -> None:
        if transfer.source == self._stream.rank:
            self._exchange.send(transfer.number, transfer.target, self._held.copy(transfer.samples))

    def _land(self, transfer: Transfer) -> None:
        if transfer.source == self._stream.rank:
            self._held.drop(transfer.samples)
        elif transfer.target == self._stream.rank:
            self._held.add(transfer.samples, self._exchange.receive(transfer.number))
        self.on_landed(transfer)


POLL_S = 0.2
"""Seconds between the receiving thread's checks for the end of the exchange."""


class SampleExchange:
    """Exchange of samples with other ranks; one thread sends, another receives.

    Parameters
    ----------
    rank_info : RankInfo
        Place of this rank in the group, with the group's key.
    spec : SampleSpec
        Shapes and types of a sample, equal on all ranks.
    interfaces : NetworkInterfaces
        Interfaces for the connections: those of control messages.
    timeouts : Timeouts
        Time limits; samples must arrive within the one for a collective operation.
    """

    def __init__(
        self,
        group: Group,
        rank_info: RankInfo,
        spec: SampleSpec,
        interfaces: NetworkInterfaces,
        timeouts: Timeouts,
    ) -> None:
        self._identity = rank_info.identity
        self._listener = Listener(rank_info.key, control_address(interfaces.control), self._identity)
        addresses = all_gather(group, encode(self._listener.address))
        self._peers = [decode(Address, address) for address in addresses]
        self._spec = spec
        self._timeouts = timeouts
        self._arrived: dict[int, Samples] = {}
        self._error = ""
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="samples-out")
        self._receiver = threading.Thread(target=self._receive_all, name="samples-in", daemon=True)
        self._receiver.start()

    def send(self, number: int, target: int, samples: Samples) -> None:
        """Send samples in the background, under a number that no other transfer of the group has."""
        self._sender.submit(self._send, number, target, samples)

    def receive(self, number: int) -> Samples:
        """Wait for the samples with a number.

        Raises
        ------
        LostPeerError
            If a connection has broken, or they do not arrive in time.
        """
        limit_s = self._timeouts.hang_s
        with self._changed:
            self._changed.wait_for(lambda: number in self._arrived or self._error, limit_s)
            if number in self._arrived:
                return self._arrived.pop(number)
        reason = self._error or f"none arrived in {limit_s:g} s"
        raise LostPeerError(f"lost the samples of another rank of the group: {reason}")

    def close(self) -> None:
        """Send what is queued, and end both threads."""
        self._sender.shutdown()
        self._closed.set()
        self._receiver.join()
        self._listener.close()

    def _send(self, number: int, target: int, samples: Samples) -> None:
        try:
            about = {"number": number, "samples": len(samples[0])}
            connection = connect(self._peers[target], about, self._timeouts.meeting_s, self._identity)
            for array in samples:
                connection.send_bytes(_bytes_of(np.ascontiguousarray(array)))
            connection.close()
        except OSError as error:
            self._fail(error)

    def _receive_all(self) -> None:
        while not self._closed.is_set():
            with suppress(TimeoutError):
                transfer, connection = self._listener.wait(POLL_S)
                arrays = self._spec.empty(transfer["samples"])
                try:
                    for array in arrays:
                        connection.receive_bytes(_bytes_of(array))
                except OSError as error:
                    self._fail(error)
                    return
                connection.close()
                with self._changed:
                    self._arrived[transfer["number"]] = arrays
                    self._changed.notify_all()

    def _fail(self, error: OSError) -> None:
        with self._changed:
            self._error = str(error)
            self._changed.notify_all()


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


@dataclass(frozen=True)
class PartitionedData:
    """Partitions that this node has, for any member.

    Parameters
    ----------
    training, validation : mapping of int to ArraySource
        Samples by the number of the partition.
    """

    settings: Partitions
    training: Mapping[int, ArraySource]
    validation: Mapping[int, ArraySource]

    def open(
        self,
        group: Group,
        rank_info: RankInfo,
        member: Member,
        interfaces: NetworkInterfaces,
        timeouts: Timeouts,
        *,
        partial: bool = False,
    ) -> tuple[Loader, Loader]:
        """Return loaders of the training and of the validation samples of a member.

        If every rank can read all partitions, nothing has to migrate.

        Parameters
        ----------
        partial : bool
            Use the partitions that the nodes of the group have, even if others are missing.

        Raises
        ------
        BadInputError
            If a partition is missing, or a rank would hold none.
        """
        found = [set(numbers) for numbers in all_gather(group, sorted(self.training))]
        wanted = sorted(set.union(*found)) if partial else range(self.settings.count)
        homes = assign_partitions(found, wanted, self.settings.described)
        if all(here.issuperset(wanted) for here in found):
            everything, held_out = self._all
            streams = streams_of(member, len(everything), len(held_out), rank_info.rank, rank_info.size)
            return ArrayLoader(everything, streams[0]), ArrayLoader(held_out, streams[1])
        own = [number for number, home in zip(wanted, homes, strict=True) if home == rank_info.rank]
        training = joined(self.training[number] for number in own)
        sizes = all_gather(group, {str(number): len(self.training[number]) for number in own})
        samples = {int(number): size for rank in sizes for number, size in rank.items()}
        accesses = SampleAccesses(np.repeat(homes, [samples[number] for number in wanted]), member.seed)
        validation = joined(self.validation[number] for number in own)
        place = rank_info.rank, rank_info.size
        stream, _ = streams_of(member, len(accesses.home), len(validation), *place)
        exchange = SampleExchange(group, rank_info, training.spec, interfaces, timeouts)
        loader = PartitionLoader(stream, (training.x, training.y), accesses, exchange)
        return loader, ArrayLoader(validation, Stream(len(validation), member.rows_evaluated, UNSHUFFLED))

    @cached_property
    def _all(self) -> tuple[ArraySource, ArraySource]:
        return joined(self.training.values()), joined(self.validation.values())


def load_partitions(settings: Partitions, data: str | None, input_fn: Callable[..., Any]) -> PartitionedData:
    """Read all partitions that exist on this node with ``input_fn(data, path)``.

    Raises
    ------
    BadInputError
        If there is none, or one does not consist of arrays.
    """
    paths = partition_paths(settings)
    if not paths:
        raise TransientInputError(
            f"none of the {settings.count} partitions {settings.described} is on {os.uname().nodename}",
            "place them on the nodes, or correct `partitions:` in the ensemble file",
        )
    training: dict[int, ArraySource] = {}
    validation: dict[int, ArraySource] = {}
    for number, path in paths.items():
        training[number], validation[number] = read_partition(path, data, input_fn)
    return PartitionedData(settings, training, validation)


def read_partition(
    path: str, data: str | None, input_fn: Callable[..., Any]
) -> tuple[ArraySource, ArraySource]:
    """Return the training and the validation samples of a partition.

    Raises
    ------
    BadInputError
        If it does not consist of arrays.
    """
    training, validation = as_sources(input_fn(data, path))
    if not (isinstance(training, ArraySource) and isinstance(validation, ArraySource)):
        raise BadInputError(
            f"input_fn returned other data than arrays for partition {path}",
            "return pairs of arrays (x, y): only they can migrate between nodes",
        )
    return training, validation


def partition_paths(settings: Partitions) -> dict[int, str]:
    """Return the paths that exist on this node, by the number of the partition."""
    paths = {number: path_on_node(path) for number, path in enumerate(settings.paths())}
    return {number: str(path) for number, path in paths.items() if path.exists()}


def joined(sources: Iterable[ArraySource]) -> ArraySource:
    """Return the samples of several sources, one after another."""
    every_x, every_y = zip(*((np.asarray(source.x), np.asarray(source.y)) for source in sources), strict=True)
    return ArraySource(np.concatenate(every_x), np.concatenate(every_y), "partitioned")


def assign_partitions(found: Sequence[Collection[int]], wanted: Sequence[int], paths: str) -> tuple[int, ...]:
    """Return the rank that holds each partition: of all that can read it, the one with the fewest so far.

    Parameters
    ----------
    found : sequence
        Partitions on the node of each rank.
    wanted : sequence of int
        Numbers of the partitions.
    paths : str
        Their paths, for messages.

    Raises
    ------
    BadInputError
        If a partition is on no node, or a rank would hold none.
    """
    ranks = {number: [rank for rank, here in enumerate(found) if number in here] for number in wanted}
    missing = [str(number) for number, having in ranks.items() if not having]
    if missing:
        raise TransientInputError(
            f"partitions {', '.join(missing)} of {paths} are on none of the nodes of this group",
            "give the member GPUs on all nodes that have partitions, or place them on its nodes",
        )
    homes: dict[int, int] = {}
    load = [0] * len(found)
    # Partitions with the fewest choices first: the others can still go elsewhere.
    for number in sorted(ranks, key=lambda number: len(ranks[number])):
        homes[number] = min(ranks[number], key=load.__getitem__)
        load[homes[number]] += 1
    if 0 in load:
        raise TransientInputError(
            f"rank {load.index(0)} of {len(found)} has no partition of {paths}",
            "make at least as many partitions on each node as it has GPUs, or use fewer GPUs",
        )
    return tuple(homes[number] for number in wanted)
