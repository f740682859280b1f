"""Samples that are read one after another from shards: files of records, or parts of a stream.

Every rank computes which shards of an epoch each rank reads, without communication. A *lane* reads one shard
after another; a rank mixes its batches from its lanes. A lane that has read its shard begins the next one of
the epoch. If there is none, it takes over the second half of the longest rest of another lane, so that all
lanes have samples until the end of the epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from copy import copy
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.errors import BadInputError, TransientInputError
from hetctl.model.values import dataclass
from hetctl.runtime.data.named_arrays import refusing_errors, rows_of
from hetctl.runtime.data.sampler import Numbers, Order, epoch_order

Array = npt.NDArray[Any]

READ = "read(shard) must return the samples of a shard, as many as `samples` says and the same ones each time"
MISSING = object()
"""Placeholder for a sample after the end of a shard."""


class Shards:
    """Samples in shards that are read from start to end, and are never whole in memory.

    Parameters
    ----------
    shards : sequence
        Shards, such as the paths of files; each is passed to `read`.
    read : callable
        ``read(shard)`` returns an iterable of the shard's samples, the same ones in the same order each time.
    samples : int or sequence of int
        Number of samples of each shard.
    collate_fn : callable or None
        ``collate_fn(samples) -> (x, y)``, as in `Collated`; None: samples are pairs (x, y) to be stacked; x
        may be a mapping.
    mix : int
        Number of shards that a rank reads at a time: each of its batches has samples of all of them.

    Raises
    ------
    BadInputError
        If there are no shards, the numbers do not fit them, or a function cannot be called.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[[Any], Iterable[Any]],
        samples: int | Sequence[int],
        collate_fn: Callable[[list[Any]], Any] | None = None,
        mix: int = 1,
    ) -> None:
        self.shards = list(shards)
        one = isinstance(samples, int | np.integer)
        counts: list[Any] = [samples] * len(self.shards) if one else [*samples]  # type: ignore[misc]
        self.read = read
        self.collate_fn = collate_fn or stacked
        self.mix = mix
        rules = (
            (self.shards, "Shards got no shards", "give it at least one"),
            (
                len(counts) == len(self.shards),
                f"Shards got {len(self.shards)} shards, but the samples of {len(counts)}",
                "give one number for all, or one for each",
            ),
            (
                all(isinstance(count, int | np.integer) and count > 0 for count in counts),
                "the samples of a shard must be whole numbers above 0",
                "leave out shards without samples",
            ),
            (mix >= 1, f"mix of Shards is {mix}, but a rank reads at least 1 shard", "leave out mix"),
            (
                callable(read) and callable(self.collate_fn),
                "read and collate_fn of Shards must be functions",
                READ,
            ),
        )
        for holds, message, hint in rules:
            if not holds:
                raise BadInputError(message, hint)
        # Checkpoints have them as JSON, which cannot represent numbers of NumPy.
        self.samples = [int(count) for count in counts]


def stacked(samples: list[Any]) -> tuple[Any, Array]:
    """Return pairs (x, y) as arrays with a row for each; x may be a mapping of names to arrays."""
    inputs, targets = zip(*samples, strict=True)
    if isinstance(inputs[0], Mapping):
        return {name: np.stack([x[name] for x in inputs]) for name in inputs[0]}, np.stack(targets)
    return np.stack(inputs), np.stack(targets)


class ShardSource:
    """Batches of `Shards`.

    Parameters
    ----------
    name : str
        Name of the samples, for messages.

    Attributes
    ----------
    sizes : list of int
        Samples of each shard.
    mix : int
        Number of shards that a rank reads at a time.
    sample : tuple of arrays
        A batch with the first sample.

    Raises
    ------
    BadInputError
        If the first sample cannot be read, or makes no batch.
    """

    def __init__(self, given: Shards, name: str) -> None:
        self._given, self._name = given, name
        self.sizes, self.mix = given.samples, given.mix
        self._first = np.concatenate([[0], np.cumsum(self.sizes)])
        with closing(self.read(0)) as samples:
            self.sample = self.batch([next(samples)])

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(self.sizes)

    def numbers(self, spans: Sequence[Span]) -> Numbers:
        """Return the numbers of samples, counted over all shards."""
        ranges = [np.arange(s.start, s.stop) + self._first[s.shard] for s in spans]
        return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)

    def read(self, shard: int) -> Generator[Any, None, None]:
        """Yield the samples of a shard.

        Raises
        ------
        BadInputError
            If the shard cannot be read, or has another number of samples than was given.
        """
        place, size = f"shard {shard} of {self._name} ({self._given.shards[shard]})", self.sizes[shard]
        with refusing_errors(f"reading {place}", READ):
            samples: Any = iter(self._given.read(self._given.shards[shard]))
            with closing(samples) if hasattr(samples, "close") else nullcontext():
                for number in range(size):
                    if (sample := next(samples, MISSING)) is MISSING:
                        raise TransientInputError(
                            f"{place} ended after {number} samples, but was given as {size}", READ
                        )
                    # More samples would never be trained.
                    if number == size - 1 and next(samples, MISSING) is not MISSING:
                        raise TransientInputError(
                            f"{place} has more samples than the {size} that were given", READ
                        )
                    yield sample

    def batch(self, samples: list[Any]) -> tuple[Array, Array]:
        """Return x and y of samples; BadInputError if they make no batch."""
        hint = "samples are pairs (x, y), or give Shards a collate_fn"
        with refusing_errors(f"making a batch of {self._name}", hint):
            return rows_of(self._given.collate_fn(samples), len(samples), f"a batch of {self._name}")


@dataclass(frozen=True)
class Span:
    """Consecutive samples of a shard, from `start` to before `stop`."""

    shard: int
    start: int
    stop: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.stop - self.start

    def cut(self, samples: int) -> tuple[Span, Span]:
        """Return the first `samples` samples, and the rest."""
        middle = self.start + samples
        return Span(self.shard, self.start, middle), Span(self.shard, middle, self.stop)


NOTHING = Span(-1, 0, 0)


class ShardPlan:
    """Position in an epoch of all lanes of a group.

    Parameters
    ----------
    order : Order
        An `order` of a plan with any number of lanes; seed and epoch alone begin the epoch.
    sizes : sequence of int
        Samples of each shard, by number.
    lanes : int
        Number of lanes.

    Attributes
    ----------
    start : int
        Samples of the epoch that lanes have taken.
    """

    def __init__(self, order: Order, sizes: Sequence[int], lanes: int) -> None:
        seed, epoch, *rest = order
        begun, *flat = rest or (0,)
        left = [Span(*flat[at : at + 3]) for at in range(0, len(flat), 3)]
        fresh = [
            Span(shard, 0, sizes[shard]) for shard in epoch_order(len(sizes), seed, epoch)[begun:].tolist()
        ]
        self._epoch, self._shards, self._first_fresh = (seed, epoch), len(sizes), len(left)
        # Rests of begun shards, then whole ones; the next one is at `_next`.
        self._waiting, self._next = left + fresh, 0
        self._lanes = [NOTHING] * lanes
        self.start = sum(sizes) - sum(map(len, self._waiting))

    @property
    def order(self) -> Order:
        """The position: seed, epoch, number of begun shards, and the spans that are left of them."""
        begun = self._shards - len(self._waiting) + max(self._next, self._first_fresh)
        spans = [span for span in self._lanes if span] + self._waiting[self._next : self._first_fresh]
        return (*self._epoch, begun, *chain.from_iterable((s.shard, s.start, s.stop) for s in spans))

    def copy(self) -> ShardPlan:
        """Return an independent plan at the same position."""
        other = copy(self)
        other._lanes = list(self._lanes)
        return other

    def assign(self, lane: int, samples: int) -> list[Span]:
        """Return the next samples of a lane; no more may be asked for than are left."""
        taken = []
        self.start += samples
        while samples:
            if not self._lanes[lane]:
                self._lanes[lane] = self._following()
            first, self._lanes[lane] = self._lanes[lane].cut(min(samples, len(self._lanes[lane])))
            taken.append(first)
            samples -= len(first)
        return taken

    def _following(self) -> Span:
        """Return an idle lane's next span: a begun shard's rest, a new shard, or half of another lane's."""
        if self._next < len(self._waiting):
            self._next += 1
            return self._waiting[self._next - 1]
        longest = max(range(len(self._lanes)), key=lambda lane: len(self._lanes[lane]))
        span = self._lanes[longest]
        self._lanes[longest], taken = span.cut(len(span) // 2)
        return taken


class ShardReader:
    """Reader of one shard, which can go back a little."""

    def __init__(self, source: ShardSource, shard: int) -> None:
        self._source, self._shard = source, shard
        self._open()

    def _open(self) -> None:
        self._samples = self._source.read(self._shard)
        self._kept: deque[Any] = deque()
        self._read = 0

    def read(self, start: int, stop: int, kept: int) -> list[Any]:
        """Return samples by their positions in the shard; keep the last ones that were read, to go back."""
        if start < self._read - len(self._kept):
            self.close()
            self._open()
        if start > self._read:
            # Skipped samples must not be in memory together.
            deque(islice(self._samples, start - self._read), 0)
            self._kept.clear()
            self._read = start
        self._kept.extend(islice(self._samples, max(0, stop - self._read)))
        self._read = max(self._read, stop)
        while len(self._kept) > max(kept, self._read - start):
            self._kept.popleft()
        first = self._read - len(self._kept)
        return list(islice(self._kept, start - first, stop - first))

    def close(self) -> None:
        """End reading."""
        self._samples.close()
