"""Batches of a rank that holds a part of the samples, while samples migrate between the ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from hetctl.model.serialization import decode, encode
from hetctl.model.site import NetworkInterfaces, Timeouts
from hetctl.runtime.data.loaders import Batch, Loader, Samples
from hetctl.runtime.data.sample_accesses import Numbers, SampleAccesses, Transfer
from hetctl.runtime.data.sampler import Chunk, Order, parts_of
from hetctl.runtime.data.sources import Array, SampleSpec
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
        """Hold samples no longer; memory is released where all that arrived together have left."""
        self._block[numbers] = -1
        for index in set(range(len(self._blocks))).difference(np.unique(self._block).tolist()):
            x, y = self._blocks[index]
            self._blocks[index] = x[:0], y[:0]

    def take(self, numbers: Numbers) -> Samples:
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


class PartitionLoader(Loader):
    """A rank's batches from partitioned data; a `Loader`.

    An epoch has as many samples as all partitions together. As long as samples have to migrate, a few of them
    are accessed twice in an epoch, and others not at all.

    Parameters
    ----------
    samples : Samples
        Samples of this rank's partitions, in the order of the partitions.
    accesses : SampleAccesses
        Accesses of all ranks' samples.
    sizes : tuple of int
        First batch sizes by rank.

    Attributes
    ----------
    on_landed : callable
        Function called with each transfer whose samples have changed their holder.
    """

    def __init__(
        self,
        rank: int,
        samples: Samples,
        accesses: SampleAccesses,
        sizes: tuple[int, ...],
        exchange: SampleExchange,
    ) -> None:
        super().__init__(len(accesses.home), (samples[0][[0]], samples[1][[0]]))
        self.accesses = accesses
        self.on_landed: Callable[[Transfer], None] = lambda _: None
        self._rank = rank
        self._sizes = sizes
        self._exchange = exchange
        self._held = HeldSamples(self.samples)
        self._held.add(np.flatnonzero(accesses.home == rank), samples)
        self._is_settled = False

    def batches(self, epoch: int, start: int, order: Order | None = None) -> Generator[Batch, None, None]:
        """Yield copies of the samples."""
        order = order or (self.accesses.seed, epoch)
        self._settle()
        while start < self.samples:
            # The sizes may have changed since the last chunk.
            stop = min(start + sum(self._sizes), self.samples)
            draw = self.accesses.draw(self._sizes, parts_of(stop - start, self._sizes))
            for change in draw.changes:
                self._land(change.transfer) if change.has_landed else self._send(change.transfer)
            own = draw.samples[self._rank]
            yield self._held.take(own) if len(own) else self.sample, Chunk(order, start, stop, own)
            start = stop

    def split(self, sizes: tuple[int, ...]) -> None:
        """Use these sizes from the next chunk on."""
        self._sizes = sizes

    def close(self) -> None:
        """Close the connections to other ranks."""
        self._exchange.close()

    def _settle(self) -> None:
        """Bring the samples to the ranks that held them in the restored state, once."""
        if self._is_settled:
            return
        self._is_settled = True
        away = self.accesses.away()
        for transfer in away:
            self._send(transfer)
        for transfer in away:
            self._land(transfer)
        for transfer in self.accesses.pending:
            self._send(transfer)

    def _send(self, transfer: Transfer) -> None:
        if transfer.source == self._rank:
            self._exchange.send(transfer.number, transfer.target, self._held.take(transfer.samples))

    def _land(self, transfer: Transfer) -> None:
        if transfer.source == self._rank:
            self._held.drop(transfer.samples)
        elif transfer.target == self._rank:
            self._held.add(transfer.samples, self._exchange.receive(transfer.number))
        self.on_landed(transfer)


POLL_S = 0.2
"""Seconds between two checks of the receiving thread whether the exchange was closed."""


class SampleExchange:
    """Sends samples to other ranks and receives theirs, in a thread each.

    Parameters
    ----------
    rank_info : RankInfo
        Place of this rank in the group, with the group's key.
    spec : SampleSpec
        Shapes and types of a sample, equal on all ranks.
    interfaces : NetworkInterfaces
        Interfaces for the connections: those of control messages.
    timeouts : Timeouts
        Time limits; samples have to arrive within that of a collective operation.
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
        """End both threads, after all that was to be sent."""
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
    """Return the memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
