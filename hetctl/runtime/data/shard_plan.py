"""Assignment of the shards of an epoch to ranks: computed by each of them, without communication.

A *lane* is a reader of one shard after another; each rank has as many as the samples of its batches are to be
mixed of. A lane that has read its shard begins the next one of the epoch. If there is none, it takes over the
second half of the longest rest of another lane, so that all lanes have samples until the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from hetctl.runtime.data.sampler import Order


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
