"""Order in which samples are trained; preprocessors and trainers compute it without communication."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.ensemble import Member
from hetctl.model.values import dataclass

Numbers = npt.NDArray[np.int64]
Order = tuple[int, ...]
"""Seed and epoch, from which the order of an epoch's samples is computed."""
UNSHUFFLED = 2**64
"""Seed of a stream that reads the samples by number in all epochs; members' seeds are smaller."""


ORDERS = 2
"""Orders that are kept for each member in training: an epoch's, and that of the validation samples."""


def epoch_order(samples: int, seed: int, epoch: int) -> Numbers:
    """Return the order in which epoch `epoch` reads the samples, independent of earlier epochs."""
    return _kept_order(samples, seed, epoch)


def keep_orders(members: int) -> None:
    """Keep the orders of so many members, which train in turns in this process."""
    global _kept_order
    _kept_order = lru_cache(ORDERS * members)(_new_order)


def _new_order(samples: int, seed: int, epoch: int) -> Numbers:
    if seed == UNSHUFFLED:
        order: Numbers = np.arange(samples)
    else:
        order = np.random.default_rng([seed, epoch]).permutation(samples)
    # The cache gives the same array to all callers.
    order.flags.writeable = False
    return order


_kept_order = lru_cache(ORDERS)(_new_order)


def sample_rng(seed: int, epoch: int, number: int) -> np.random.Generator:
    """Return the generator of a sample's random part, which depends neither on order nor on process.

    In an unshuffled stream, as of validation samples, it is the same in all epochs, and one that no training
    sample gets. It is valid until the next call: to set a counter is much faster than to create a generator.
    """
    # Epochs of training count from 1.
    bits, fresh, generator = _counted(0, 0) if seed == UNSHUFFLED else _counted(seed, epoch)
    # The sample's number is the highest of four words: its stream of 2**192 steps meets no other.
    fresh["state"]["counter"][:] = (0, 0, 0, number)
    bits.state = fresh
    return generator


@lru_cache(maxsize=2)
def _counted(seed: int, epoch: int) -> tuple[np.random.Philox, Any, np.random.Generator]:
    """Return the generator of an epoch, with a separate stream for each value of its counter."""
    key = np.random.SeedSequence([seed, epoch]).generate_state(2, np.uint64)
    # Counter-based, so that each sample has a stream without a generator of its own (Salmon et al., SC 2011).
    bits = np.random.Philox(key=key)
    return bits, bits.state, np.random.Generator(bits)


@dataclass(frozen=True)
class Chunk:
    """Samples that are prepared, and trained, together.

    Parameters
    ----------
    order : Order
        Order of the chunk's epoch.
    start, stop : int
        Positions of the whole group's samples in the epoch's order.
    numbers : array of int
        Numbers of this rank's samples; may be empty.
    """

    order: Order
    start: int
    stop: int
    numbers: Numbers


@dataclass(frozen=True)
class Stream:
    """All samples repeatedly, each epoch in an order of its own, divided into chunks.

    Parameters
    ----------
    chunk : int
        Samples of a chunk; the last one of an epoch may have fewer.
    epoch, start : int
        Epoch in which the stream begins, and the number of its samples that are skipped.
    rank, ranks : int
        Rank whose share of each chunk the stream has, and the number of ranks.
    sizes : tuple of int
        Samples of each rank in a full chunk; empty: sizes that differ by at most one sample.
    """

    samples: int
    chunk: int
    seed: int
    epoch: int = 1
    start: int = 0
    rank: int = 0
    ranks: int = 1
    sizes: tuple[int, ...] = ()

    def at(self, position: int) -> Chunk:
        """Return the chunk at a position of the stream, counted from 0."""
        epoch, start = self.epoch, self.start + position * self.chunk
        first = -(-(self.samples - self.start) // self.chunk)
        if position >= first:
            later, index = divmod(position - first, -(-self.samples // self.chunk))
            epoch, start = self.epoch + 1 + later, index * self.chunk
        stop = min(start + self.chunk, self.samples)
        own = self.share(start, stop)
        return Chunk((self.seed, epoch), start, stop, epoch_order(self.samples, self.seed, epoch)[own])

    @property
    def split(self) -> tuple[int, ...]:
        """Samples of each rank in a full chunk."""
        return self.sizes or parts_of(self.chunk, (1,) * self.ranks)

    def share(self, start: int, stop: int) -> slice:
        """Return the positions of this rank's samples in the chunk from `start` to `stop`."""
        ends = _ends(stop - start, self.sizes or (1,) * self.ranks)
        return slice(start + ends[self.rank], start + ends[self.rank + 1])


def reassigned(
    samples: int, planned: tuple[int, ...], sizes: tuple[int, ...], rank: int
) -> tuple[slice, tuple[int, ...]]:
    """Return a rank's positions in a chunk that was prepared with other sizes.

    Each rank keeps as many of its first planned positions as it needs. What shrinking ranks give up goes, in
    order, to growing ones; no fewer samples can move.

    Parameters
    ----------
    samples : int
        Samples of the chunk.
    planned, sizes : tuple of int
        Sizes of all ranks when the chunk was prepared, and now, as in `Stream`.

    Returns
    -------
    tuple
        Planned positions that it keeps, and positions from others.
    """
    before, now = parts_of(samples, planned), parts_of(samples, sizes)
    starts = _ends(samples, planned)
    kept = [min(pair) for pair in zip(before, now, strict=True)]
    left = [
        start + at for start, own, size in zip(starts, kept, before, strict=False) for at in range(own, size)
    ]
    first = sum(now[:rank]) - sum(kept[:rank])
    taken = left[first : first + now[rank] - kept[rank]]
    return slice(starts[rank], starts[rank] + kept[rank]), tuple(taken)


def moved(planned: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Return the number of samples of a full chunk that move between ranks."""
    return sum(max(0, size - before) for before, size in zip(planned, sizes, strict=True))


@lru_cache(maxsize=64)
def _ends(samples: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bounds of the parts of a chunk."""
    return (0, *accumulate(parts_of(samples, sizes)))


def parts_of(samples: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return parts in proportion to `sizes`, rounded by largest remainders; ties by rank."""
    total = sum(sizes)
    parts = [samples * size // total for size in sizes]
    # Remainders are compared as integers: equal sizes must tie on every machine.
    by_remainder = sorted(range(len(sizes)), key=lambda rank: -(samples * sizes[rank] % total))
    for rank in by_remainder[: samples - sum(parts)]:
        parts[rank] += 1
    return tuple(parts)


def micro_batches(samples: int, most: int | None) -> tuple[int, ...]:
    """Return the fewest sizes of up to `most` samples for a rank's part of a chunk, as equal as possible."""
    # Equal sizes: batch norm would suffer from a last batch of few samples.
    return (samples,) if most is None or samples <= most else parts_of(samples, (1,) * -(-samples // most))


def streams_of(member: Member, samples: int, held_out: int, rank: int, ranks: int) -> tuple[Stream, Stream]:
    """Return a rank's streams of the training and of the validation samples of a member."""
    chunk, rows = member.step_samples(ranks), member.rows_evaluated * ranks
    return (
        Stream(samples, chunk, member.seed, rank=rank, ranks=ranks),
        Stream(held_out, rows, UNSHUFFLED, rank=rank, ranks=ranks),
    )
