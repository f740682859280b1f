"""Samples that are read one after another from shards: files of records, or parts of a stream.

The shards of an epoch are assigned to ranks by each of them, without communication. A *lane* is a reader of
one shard after another; each rank has as many as the samples of its batches are to be mixed of. A lane that
has read its shard begins the next one of the epoch. If there is none, it takes over the second half of the
longest rest of another lane, so that all lanes have samples until the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.errors import BadInputError, HetctlError
from hetctl.runtime.data.named_arrays import rows_of
from hetctl.runtime.data.sampler import Numbers, Order

Array = npt.NDArray[Any]

READ = "read(shard) must return the samples of a shard, as many as `samples` says and the same ones each time"
MISSING = object()
"""Stands for a sample after the end of a shard."""


class Shards:
    """Samples in shards, which are read from their beginning to their end and are never in memory as a whole.

    Parameters
    ----------
    shards : sequence
        Shards, such as the paths of files; each is passed to `read`.
    read : callable
        ``read(shard)`` returns an iterable of the shard's samples, the same ones in the same order each time.
    samples : int or sequence of int
        Number of samples of each shard.
    collate_fn : callable or None
        ``collate_fn(samples) -> (x, y)``, as of `Collated`; None: samples are pairs (x, y), of which x may be
        a mapping, and are stacked.
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
        reader = ShardReader(self, 0)
        self.sample = self.batch(reader.take(0, 1, 0))
        reader.close()

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(self.sizes)

    def numbers(self, spans: Sequence[Span]) -> Numbers:
        """Return the numbers of samples, counted over all shards."""
        ranges = [np.arange(s.start, s.stop) + self._first[s.shard] for s in spans]
        return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)

    def open(self, shard: int) -> Iterator[Any]:
        """Return an iterator over the samples of a shard."""
        return iter(self._given.read(self._given.shards[shard]))

    def batch(self, samples: list[Any]) -> tuple[Array, Array]:
        """Return x and y of samples; BadInputError if they make no batch."""
        try:
            return rows_of(self._given.collate_fn(samples), len(samples), f"a batch of {self._name}")
        except HetctlError:
            raise
        except Exception as error:
            message = f"making a batch of {self._name}: {type(error).__name__}: {error}"
            raise BadInputError(message, "samples are pairs (x, y), or give Shards a collate_fn") from error

    def place(self, shard: int) -> str:
        """Return the name of a shard, for messages."""
        return f"shard {shard} of {self._name} ({self._given.shards[shard]})"


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
    shards : sequence of int
        Shards of the epoch in their order.
    sizes : sequence of int
        Samples of each shard, by number.
    lanes : int
        Number of lanes.
    begun : int
        Number of shards that were begun before.
    left : sequence of Span
        Spans of those that no lane has taken.
    """

    def __init__(
        self,
        shards: Sequence[int],
        sizes: Sequence[int],
        lanes: int,
        begun: int = 0,
        left: Sequence[Span] = (),
    ) -> None:
        self._shards, self._sizes = shards, sizes
        self._begun, self._left = begun, list(left)
        self._open = [NOTHING] * lanes

    @property
    def samples_left(self) -> int:
        """Samples of the epoch that no lane has taken."""
        fresh = (self._sizes[shard] for shard in self._shards[self._begun :])
        return sum(map(len, chain(self._open, self._left))) + sum(fresh)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans of the shards that were begun which no lane has taken."""
        return tuple(span for span in (*self._open, *self._left) if span)

    def copy(self) -> ShardPlan:
        """Return a plan that goes on from here by itself."""
        other = ShardPlan(self._shards, self._sizes, len(self._open), self._begun, self._left)
        other._open = list(self._open)
        return other

    def take(self, lane: int, samples: int) -> list[Span]:
        """Return the next samples of a lane; no more may be asked for than are left."""
        taken = []
        while samples:
            if not self._open[lane]:
                self._open[lane] = self._next()
            first, self._open[lane] = self._open[lane].cut(min(samples, len(self._open[lane])))
            taken.append(first)
            samples -= len(first)
        return taken

    def rest_of(self, lane: int) -> Span:
        """Return the rest of a lane's shard."""
        return self._open[lane]

    def encoded(self, seed: int, epoch: int) -> Order:
        """Return the position as an order, from which `decoded` makes a plan for any number of lanes."""
        flat = chain.from_iterable((span.shard, span.start, span.stop) for span in self.spans)
        return (seed, epoch, self._begun, *flat)

    @classmethod
    def decoded(cls, order: Order, shards: Sequence[int], sizes: Sequence[int], lanes: int) -> ShardPlan:
        """Return the plan at a position; an order of seed and epoch alone is the epoch's beginning."""
        _, _, *rest = order
        begun, flat = (rest[0], rest[1:]) if rest else (0, [])
        return cls(shards, sizes, lanes, begun, list(_spans(flat)))

    def _next(self) -> Span:
        """Return the next span for a lane that has none: left before, of a new shard, or of another lane."""
        if self._left:
            return self._left.pop(0)
        if self._begun < len(self._shards):
            shard = self._shards[self._begun]
            self._begun += 1
            return Span(shard, 0, self._sizes[shard])
        longest = max(range(len(self._open)), key=lambda lane: len(self._open[lane]))
        span = self._open[longest]
        self._open[longest], taken = span.cut(len(span) // 2)
        return taken


def _spans(flat: Sequence[int]) -> Iterator[Span]:
    for at in range(0, len(flat), 3):
        shard, start, stop = flat[at : at + 3]
        yield Span(shard, start, stop)


class ShardReader:
    """Reader of one shard, which can go back to samples that are not yet forgotten."""

    def __init__(self, source: ShardSource, shard: int) -> None:
        self._source, self._shard = source, shard
        self._samples: Iterator[Any] | None = None
        self._kept: list[Any] = []
        self._first = 0

    def take(self, start: int, stop: int, kept_from: int) -> list[Any]:
        """Return samples by their positions in the shard.

        Parameters
        ----------
        kept_from : int
            Position from which on samples may be asked for later; those before it are forgotten.

        Raises
        ------
        BadInputError
            If the shard cannot be read, or has another number of samples than was given.
        """
        if self._samples is None or start < self._first:
            self.close()
            self._samples, self._kept, self._first = self._opened(), [], 0
        while self._first + len(self._kept) < stop:
            self._kept.append(self._next())
            # At once: what is skipped must not be in memory together.
            self._forget(min(start, kept_from))
        self._forget(min(start, kept_from))
        self._check_end(stop)
        return self._kept[start - self._first : stop - self._first]

    def _forget(self, before: int) -> None:
        """Forget the samples before a position, as far as they are read."""
        count = min(before - self._first, len(self._kept))
        if count > 0:
            del self._kept[:count]
            self._first += count

    def close(self) -> None:
        """End reading."""
        end = getattr(self._samples, "close", None)
        if end is not None:
            end()
        self._samples = None

    def _opened(self) -> Iterator[Any]:
        try:
            return self._source.open(self._shard)
        except Exception as error:
            raise self._failed(error) from error

    def _next(self) -> Any:
        """Return the next sample; BadInputError if there is none."""
        sample = self._read()
        if sample is MISSING:
            place, read = self._source.place(self._shard), self._first + len(self._kept)
            given = self._source.sizes[self._shard]
            raise BadInputError(f"{place} ended after {read} samples, but was given as {given}", READ)
        return sample

    def _check_end(self, stop: int) -> None:
        """Refuse a shard with more samples than given: they would never be trained."""
        if stop < self._source.sizes[self._shard]:
            return
        if self._read() is not MISSING:
            place = self._source.place(self._shard)
            raise BadInputError(f"{place} has more samples than the {stop} that were given", READ)
        self._samples = iter(())

    def _read(self) -> Any:
        assert self._samples is not None
        try:
            return next(self._samples, MISSING)
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> BadInputError:
        place = self._source.place(self._shard)
        return BadInputError(f"reading {place}: {type(error).__name__}: {error}", READ)
