"""A ring of slots in shared memory: several producers, several readers, one order, no copies, no server.

The ring is one memory-mapped file. Position p of the stream is in slot ``p % slots``. A producer locks the
slot of a position that it has claimed, and a reader locks its number; the kernel releases a lock when its
holder dies. So a claimed position that is neither published nor locked has lost its producer, and a reader
without a lock has died. Every step changes a single aligned word, so no death leaves it half written.

    producer                                            reader
    while (p := ring.claim(60)) is not None:            p = ring.register_reader(number)
        used = fill(ring.buffer(p))                     while True:
        ring.publish(p, used)                               use(ring.read(p, 60)); ring.release(p); p += 1

Waiting processes check again every `POLL_S` seconds. Claims, new readers and ends exclude each other by one
more lock, held for some microseconds; publishing, taking and releasing need none.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetctl.model.errors import HetctlError, LockedError, TransientInputError
from hetctl.model.values import dataclass
from hetctl.runtime.data.sharing.shared_file import ByteLocks, create, fence, map_whole

AWAITED, DROPPED, LEFT = 0, 2**64 - 2, 2**64 - 1
"""Words of absent readers: not joined yet, died, and left in order."""


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
    """

    claimed: Sequence[int]
    published: Sequence[int]
    readers: Sequence[int]

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
        return sorted(c - 1 for c, p in pairs if c != p)

    def keeping(self, position: int) -> list[int]:
        """Return the readers that still need the content that a claim of `position` would overwrite."""
        passed = position - len(self.claimed) + 1
        return [number for number, word in enumerate(self.readers) if word <= passed and passed > 0]


def next_claim(cursors: Cursors, held: Collection[int], awaiting: bool) -> int | str | None:
    """Return the position that a producer may claim, or why there is none yet; None if none will be.

    Unfinished positions of dead producers come first, since all readers need them first. While no reader is
    present, nothing is overwritten: one may join, or join again. If all have left in order, none will.

    Parameters
    ----------
    held : collection of int
        Unpublished positions whose producers are alive.
    awaiting : bool
        True if readers that have not joined yet are still awaited.
    """
    unpublished, position = cursors.unpublished(), cursors.next
    if left_over := [each for each in unpublished if each not in held]:
        return left_over[0]
    if all(word == LEFT for word in cursors.readers):
        return None
    old = position - len(cursors.claimed)
    if old in unpublished:
        return f"its slot's last position, {old}, has not been published yet"
    absent = () if awaiting else (AWAITED,)
    keeping = [number for number in cursors.keeping(position) if cursors.readers[number] not in absent]
    if keeping:
        return f"position {old} is still needed by reader {', '.join(map(str, keeping))}"
    if old >= 0 and not any(AWAITED < word < DROPPED for word in cursors.readers):
        return "no reader is there"
    return position


Bytes = npt.NDArray[np.uint8]

POLL_S = 0.001
CHECK_EVERY_S = 0.05
"""Seconds between two checks of a waiting producer whether the awaited processes are alive."""

TURN_TIMEOUT_S = 10.0
"""Longest wait of joins and ends for the lock of claims, in seconds; only a stopped holder exceeds it."""

MAGIC = int.from_bytes(b"hetring2", "little")
WORD = 8
PAGE = mmap.PAGESIZE
NO_READER = -1


class RingTimeoutError(HetctlError):
    """Timeout of a wait for a position or a lock."""


@dataclass(frozen=True)
class RingShape:
    """Fixed dimensions of a ring.

    Parameters
    ----------
    slot_bytes : int
        Largest number of bytes of one position.
    readers : int
        Number of readers; they are numbered from 0.
    """

    slots: int
    slot_bytes: int
    readers: int

    @property
    def data_start(self) -> int:
        """Offset of the first slot in bytes."""
        return _whole_pages((HEAD + self.readers + 3 * self.slots) * WORD)

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return _whole_pages(self.slot_bytes)

    @property
    def bytes(self) -> int:
        """Length of the file in bytes."""
        return self.data_start + self.slots * self.stride


HEAD = 5
"""Words before the tables: `MAGIC`, the shape's three, the time until which readers are awaited."""
AWAITED_UNTIL = 4


class Ring:
    """An existing ring, opened by one thread of one process. A forked child must open it again.

    Claims, and the number of a reader, last as long as this object is open.

    Parameters
    ----------
    path : Path
        File of the ring.

    Raises
    ------
    OSError
        If there is no such file.
    TransientInputError
        If it is no ring, or there is no space for all of it; a file without space is removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory = map_whole(path, "a ring", "give it fewer or smaller slots, or a folder with more room")
        self.shape, words = _read(path, memoryview(self._memory))
        self._head = words[:HEAD]
        sizes = (self.shape.readers, *[self.shape.slots] * 3)
        starts = [HEAD + sum(sizes[:i]) for i in range(len(sizes))]
        tables = [words[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        self._readers, self._claimed, self._published, self._used = tables
        self._locks = ByteLocks(path)
        self._claims: set[int] = set()
        self._number = NO_READER
        self._next = 0
        self._taken: set[int] = set()

    @classmethod
    def create(cls, path: Path, shape: RingShape, join_timeout_s: float) -> Ring:
        """Open a ring; the first process creates it atomically.

        Parameters
        ----------
        path : Path
            File in a folder, on a local file system, that only the owner can enter.
        join_timeout_s : float
            Seconds after the creation in which nothing is overwritten until all readers have joined.

        Raises
        ------
        TransientInputError
            If there is a ring of another shape.
        """
        if not path.exists():
            awaited_until = time.monotonic_ns() + int(join_timeout_s * 1e9)
            words = (MAGIC, shape.slots, shape.slot_bytes, shape.readers, awaited_until)
            create(path, b"".join(word.to_bytes(WORD, "little") for word in words), shape.bytes)
        ring = cls(path)
        if ring.shape != shape:
            ring.close()
            raise TransientInputError(f"{path} has another shape: {ring.shape} rather than {shape}")
        return ring

    def close(self) -> None:
        """Release all claims and a reader's lock, as at death; see `unregister_reader`."""
        self._locks.close()

    def claim(self, timeout_s: float) -> int | None:
        """Claim the next unclaimed position, or one of a dead producer; None if no more will come.

        None is returned when all readers have left.

        Raises
        ------
        RingTimeoutError
            If readers or other producers take too long.
        """
        wait = _Waiting(self._path, timeout_s)
        next_check = 0.0
        while True:
            # First without locks, which cost system calls: all producers are taken to be alive here.
            cursors = self._cursors()
            outcome = next_claim(cursors, cursors.unpublished(), self._awaiting)
            if not isinstance(outcome, str) or time.monotonic() >= next_check:
                next_check = time.monotonic() + CHECK_EVERY_S
                with self._turn(wait):
                    outcome = self._next_claim()
                    outcome = self._hold(outcome) if isinstance(outcome, int) else outcome
            if not isinstance(outcome, str):
                return outcome
            wait.sleep(f"no position could be claimed: {outcome}")

    def is_neglected(self) -> bool:
        """Return true if a position could be claimed now, but no process has claimed it."""
        with self._turn(_Waiting(self._path, TURN_TIMEOUT_S)):
            return isinstance(self._next_claim(), int)

    @property
    def newest(self) -> int:
        """One more than the last position that has been published; 0 if none has."""
        return max(self._published)

    def is_in_preparation(self) -> bool:
        """Return true if a position is claimed, or could be; false while readers keep all slots."""
        with self._turn(_Waiting(self._path, TURN_TIMEOUT_S)):
            return isinstance(self._next_claim(), int) or bool(self._cursors().unpublished())

    def buffer(self, position: int) -> Bytes:
        """Return the slot of a position that this object has claimed: an array of `slot_bytes` bytes."""
        return self._slot(position, self.shape.slot_bytes)

    def publish(self, position: int, used_bytes: int) -> None:
        """Give the readers the first `used_bytes` of a position that this object has claimed."""
        slot = position % self.shape.slots
        self._used[slot] = used_bytes
        # Processors such as ARM's may make the word visible before the bytes that it announces.
        fence()
        self._published[slot] = position + 1
        self._claims.remove(position)
        self._locks.release(self._slot_lock(position))

    def register_reader(self, number: int) -> int:
        """Become a reader; return its first position, the oldest that has not been overwritten.

        Raises
        ------
        LockedError
            If another living reader has the number.
        """
        if not self._locks.acquire(self._reader_lock(number)):
            raise LockedError(f"reader {number} of {self._path} exists already", "end its process first")
        with self._turn(_Waiting(self._path, TURN_TIMEOUT_S)):
            self._next = self._cursors().oldest
            self._readers[number] = self._next + 1
        self._number = number
        return self._next

    def read(self, position: int, timeout_s: float) -> Bytes:
        """Return a position's bytes, read-only and in place.

        Positions are taken in order; positions that are skipped count as released.

        Raises
        ------
        RingTimeoutError
            If it has not been published in time.
        """
        if position not in self._taken:
            self._next = position
            self._show_progress()
        slot = position % self.shape.slots
        wait = _Waiting(self._path, timeout_s)
        while self._published[slot] != position + 1:
            wait.sleep(f"position {position} has not been published")
        # Processors such as ARM's may also read the bytes before the word.
        fence()
        self._taken.add(position)
        self._next = max(self._next, position + 1)
        view = self._slot(position, self._used[slot])
        view.flags.writeable = False
        return view

    def release(self, position: int) -> None:
        """Release a position that was taken: its view may change at any time from now on."""
        self._taken.remove(position)
        self._show_progress()

    def unregister_reader(self) -> None:
        """Stop being a reader; all views may change at any time from now on."""
        # Before the lock is released: a producer that saw an old word and a free lock would count it as dead.
        self._readers[self._number] = LEFT
        self._locks.release(self._reader_lock(self._number))
        self._number = NO_READER
        self._taken.clear()

    @property
    def deserted(self) -> bool:
        """True if no reader is present or awaited; a dead one counts until a claim needs its slot."""
        absent = {DROPPED, LEFT} if self._awaiting else {AWAITED, DROPPED, LEFT}
        return all(word in absent for word in self._readers)

    @property
    def _awaiting(self) -> bool:
        # CLOCK_MONOTONIC is the same in all processes of a machine, so that it may stand in shared memory.
        return time.monotonic_ns() < self._head[AWAITED_UNTIL]

    def _cursors(self) -> Cursors:
        return Cursors(self._claimed.tolist(), self._published.tolist(), self._readers.tolist())

    def _slot(self, position: int, size: int) -> Bytes:
        start = self.shape.data_start + position % self.shape.slots * self.shape.stride
        return np.frombuffer(self._memory, np.uint8, size, start)

    def _next_claim(self) -> int | str | None:
        """Return what `next_claim` does, after readers that have died are dropped."""
        cursors = self._cursors()
        for number in cursors.keeping(cursors.next):
            word = cursors.readers[number]
            alive = number == self._number or self._locks.held_by_another(self._reader_lock(number))
            # A reader that leaves changes its word before it releases its lock.
            if word != AWAITED and not alive and self._readers[number] == word:
                self._readers[number] = DROPPED
        cursors = self._cursors()
        held = {position for position in cursors.unpublished() if self._is_held(position)}
        return next_claim(cursors, held, self._awaiting)

    def _is_held(self, position: int) -> bool:
        return position in self._claims or self._locks.held_by_another(self._slot_lock(position))

    def _hold(self, position: int) -> int | str:
        slot = position % self.shape.slots
        if not self._locks.acquire(self._slot_lock(position)):
            return f"the slot of position {position} is not free yet"
        # A producer that was taken for dead may have published between the choice and the lock.
        if self._published[slot] == position + 1:
            self._locks.release(self._slot_lock(position))
            return f"position {position} was published at this moment"
        self._claimed[slot] = position + 1
        self._claims.add(position)
        return position

    def _show_progress(self) -> None:
        self._readers[self._number] = min({*self._taken, self._next}) + 1

    def _reader_lock(self, number: int) -> int:
        return 1 + number

    def _slot_lock(self, position: int) -> int:
        return 1 + self.shape.readers + position % self.shape.slots

    @contextmanager
    def _turn(self, wait: _Waiting) -> Iterator[None]:
        """Hold the lock of claims, byte 0."""
        while not self._locks.acquire(0):
            wait.sleep("another process holds the lock of claims")
        try:
            yield
        finally:
            self._locks.release(0)


class _Waiting:
    """Wait in short sleeps until a timeout."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s

    def sleep(self, reason: str) -> None:
        if time.monotonic() >= self._until:
            raise RingTimeoutError(
                f"{self._path}: {reason}, within {self._timeout_s:g} s",
                "check for hanging processes on the node, or allow more time",
            )
        time.sleep(POLL_S)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _read(path: Path, memory: memoryview) -> tuple[RingShape, memoryview[int]]:
    """Return the shape of a ring, and its memory as words."""
    if not len(memory) % PAGE:
        words = memory.cast("Q")
        magic, slots, slot_bytes, readers = words[:AWAITED_UNTIL]
        if magic == MAGIC and (shape := RingShape(slots, slot_bytes, readers)).bytes == len(memory):
            return shape, words
    raise TransientInputError(f"{path} is no ring, or one of another version of hetctl")
