"""How far the producers and readers of a ring have come, and which position may be claimed next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

AWAITED, DROPPED, LEFT = 0, 2**64 - 2, 2**64 - 1
"""Words of readers that are not there: never came, died, left in order."""

ENDLESS = 2**64 - 1


@dataclass(frozen=True)
class Wait:
    """Nothing to be had yet, and why."""

    why: str


@dataclass(frozen=True)
class Cursors:
    """The words of a ring at one moment.

    Words that name a position hold that position plus one, so that 0 names none. Positions are claimed
    in order, so those of the slots are always the last `len(claimed)` ones of the stream.

    Parameters
    ----------
    claimed : sequence of int
        For each slot the position that it was last claimed for.
    published : sequence of int
        For each slot the position that it last held whole.
    readers : sequence of int
        For each reader the first position that it still needs, or one of `AWAITED`, `DROPPED`, `LEFT`.
    end : int
        The first position that the stream does not have, `ENDLESS` until that is known.
    """

    claimed: Sequence[int]
    published: Sequence[int]
    readers: Sequence[int]
    end: int = ENDLESS

    @property
    def next(self) -> int:
        """The first position that nobody has claimed."""
        return max(self.claimed)

    @property
    def oldest(self) -> int:
        """The first position that no claim has overwritten."""
        return max(0, self.next - len(self.claimed))

    def unpublished(self) -> list[int]:
        """Return the positions that are claimed and not yet published, in order."""
        pairs = zip(self.claimed, self.published, strict=True)
        return sorted(c - 1 for c, p in pairs if c != p and c <= self.end)

    def keeping(self, position: int) -> list[int]:
        """Return the readers that need what lies in the slot of a position that is yet to be claimed."""
        passed = position - len(self.claimed) + 1
        return [number for number, word in enumerate(self.readers) if word <= passed and passed > 0]


def choose(cursors: Cursors, held: Collection[int], mine: bool, awaiting: bool) -> int | Wait | None:
    """Choose the position that a producer may claim; None if there will be none any more.

    What a dead producer left goes first, since all readers come to it first. While no reader is there,
    nothing is overwritten: one may come, or come back. If all left in order, none will.

    Parameters
    ----------
    held : collection of int
        The unpublished positions whose producers live.
    mine : bool
        Whether the producer itself holds any of those, so that it must not wait for them.
    awaiting : bool
        Whether readers that never came are still waited for.
    """
    unpublished = cursors.unpublished()
    left_over = [position for position in unpublished if position not in held]
    position = cursors.next
    if left_over:
        return left_over[0]
    if position >= cursors.end and unpublished and not mine:
        return Wait(f"another producer prepares position {unpublished[0]}, the last ones of the stream")
    if position >= cursors.end or all(word == LEFT for word in cursors.readers):
        return None
    return _obstacle(cursors, position, unpublished, awaiting) or position


def _obstacle(cursors: Cursors, position: int, unpublished: list[int], awaiting: bool) -> Wait | None:
    """Return why the slot of the next position is not free, if it is not."""
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
