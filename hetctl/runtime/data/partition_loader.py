"""Batches of a rank that holds a part of the samples, while samples migrate between the ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np

from hetctl.runtime.data.loaders import Batch, Loader, Samples
from hetctl.runtime.data.sample_accesses import Numbers, SampleAccesses, Transfer
from hetctl.runtime.data.sample_exchange import SampleExchange
from hetctl.runtime.data.sampler import Chunk, Order, parts_of


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
