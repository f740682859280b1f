"""Progress of the producers and readers of a ring, and the choice of the next position to claim."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

AWAITED, DROPPED, LEFT = 0, 2**64 - 2, 2**64 - 1
"""Words of absent readers: not joined yet, died, and left in order."""

ENDLESS = 2**64 - 1


@dataclass(frozen=True)
class Wait:
    """State in which no position can be claimed yet, and its reason."""

    reason: str


@dataclass(frozen=True)
class Cursors:
    """The words of a ring at one moment.

    Words for positions contain the position plus one, so that 0 means none. Positions are claimed in
    order, so those in the slots are always the last `len(claimed)` ones of the stream.

    Parameters
    ----------
    claimed : sequence of int
        Position for which each slot was last claimed, as a word.
    published : sequence of int
        Position that each slot last held completely, as a word.
    readers : sequence of int
        First position that each reader still needs, as a word, or one of `AWAITED`, `DROPPED`, `LEFT`.
    end : int
        First position after the end of the stream; `ENDLESS` until it is known.
    """

    claimed: Sequence[int]
    published: Sequence[int]
    readers: Sequence[int]
    end: int = ENDLESS

    @property
    def next(self) -> int:
        """First position that is not claimed yet."""
        return max(self.claimed)

    @property
    def oldest(self) -> int:
        """First position that no claim has overwritten."""
        return max(0, self.next - len(self.claimed))

    def unpublished(self) -> list[int]:
        """Return the positions that are claimed and not yet published, in order."""
        pairs = zip(self.claimed, self.published, strict=True)
        return sorted(c - 1 for c, p in pairs if c != p and c <= self.end)

    def keeping(self, position: int) -> list[int]:
        """Return the readers that still need the content that a claim of `position` would overwrite."""
        passed = position - len(self.claimed) + 1
        return [number for number, word in enumerate(self.readers) if word <= passed and passed > 0]


def choose(cursors: Cursors, held: Collection[int], holds_claims: bool, awaiting: bool) -> int | Wait | None:
    """Return the position that a producer may claim; None if there will be none any more.

    Unfinished positions of dead producers come first, since all readers need them first. While no reader is
    present, nothing is overwritten: one may join, or join again. If all have left in order, none will.

    Parameters
    ----------
    held : collection of int
        Unpublished positions whose producers are alive.
    holds_claims : bool
        True if the producer itself holds any of those, so that it must not wait for them.
    awaiting : bool
        True if readers that have not joined yet are still awaited.
    """
    unpublished = cursors.unpublished()
    left_over = [position for position in unpublished if position not in held]
    position = cursors.next
    if left_over:
        return left_over[0]
    if position >= cursors.end and unpublished and not holds_claims:
        return Wait(f"another producer prepares position {unpublished[0]}, the last ones of the stream")
    if position >= cursors.end or all(word == LEFT for word in cursors.readers):
        return None
    return _obstacle(cursors, position, unpublished, awaiting) or position


def _obstacle(cursors: Cursors, position: int, unpublished: list[int], awaiting: bool) -> Wait | None:
    """Return why the slot of the next position is not free; None if it is."""
    old = position - len(cursors.claimed)
    if old in unpublished:
        return Wait(f"its slot's last position, {old}, has not been published yet")
    absent = () if awaiting else (AWAITED,)
    keeping = [number for number in cursors.keeping(position) if cursors.readers[number] not in absent]
    if keeping:
        return Wait(f"position {old} is still needed by reader {', '.join(map(str, keeping))}")
    if old >= 0 and not any(AWAITED < word < DROPPED for word in cursors.readers):
        return Wait("no reader is there")
    return None
