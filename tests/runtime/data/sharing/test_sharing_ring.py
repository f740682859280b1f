"""Rings: each reader takes every position complete and in order, even if processes are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import sys
import time
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kills import KILLS

from hetctl.model.errors import BadInputError, LockedError, TransientInputError
from hetctl.runtime.data.sharing import ring, shared_file
from hetctl.runtime.data.sharing.ring import (
    AWAITED,
    DROPPED,
    LEFT,
    Cursors,
    Ring,
    RingShape,
    RingTimeoutError,
    next_claim,
)

PATIENCE_S = 60.0
SLOT_BYTES = 5000
FORK = multiprocessing.get_context("fork")
TRACED = {ring.__file__, shared_file.__file__}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ring"


def content(position):
    return np.random.default_rng(position).bytes(100 + 37 * position % (SLOT_BYTES - 100))


def fill(ring, position):
    data = content(position)
    ring.buffer(position)[: len(data)] = np.frombuffer(data, np.uint8)
    ring.publish(position, len(data))


def produce(path, end):
    """Fill the positions before `end` that no living producer has claimed."""
    with closing(Ring(path)) as ring:
        while (position := ring.claim(PATIENCE_S)) is not None and position < end:
            fill(ring, position)
            if position == end - 1:
                return


def read(path, number, end, pause_s=0.0):
    """Read from the first position left to before `end`; return positions and contents."""
    with closing(Ring(path)) as ring:
        seen = []
        for position in range(ring.register_reader(number), end):
            view = ring.read(position, PATIENCE_S)
            time.sleep(pause_s)
            seen.append((position, view.tobytes()))
            ring.release(position)
        ring.unregister_reader()
    return seen


def stream(start, end):
    return [(position, content(position)) for position in range(start, end)]


class Child:
    """A forked process that runs a function."""

    def __init__(self, function, *arguments):
        self._results, writer = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=_run, args=(writer, function, arguments), daemon=True)
        self.process.start()
        writer.close()

    def result(self):
        """Return the result of the function, or a value that it has sent."""
        assert self.has_sent(PATIENCE_S), "the child has sent nothing"
        return self._results.recv()

    def has_sent(self, timeout_s):
        return self._results.poll(timeout_s)

    def kill(self):
        self.process.kill()
        self.process.join()


def _run(writer, function, arguments):
    if "send" in function.__code__.co_varnames:
        arguments = (*arguments, writer.send)
    writer.send(function(*arguments))


def sleep_forever():
    time.sleep(3600)


# Streams


@pytest.mark.parametrize(("slots", "producers", "readers"), [(1, 1, 1), (3, 2, 2), (8, 3, 3)])
def test_every_reader_sees_every_position_in_order(path, slots, producers, readers):
    Ring.create(path, RingShape(slots, SLOT_BYTES, readers), PATIENCE_S)
    reading = [Child(read, path, number, 50) for number in range(readers)]
    producing = [Child(produce, path, 50) for _ in range(producers)]
    assert [child.result() for child in reading] == [stream(0, 50)] * readers
    assert [child.result() for child in producing] == [None] * producers


def test_a_slow_reader_is_not_overtaken(path):
    Ring.create(path, RingShape(2, SLOT_BYTES, 2), PATIENCE_S)
    reading = [Child(read, path, 0, 20), Child(read, path, 1, 20, 0.01)]
    produce(path, 20)
    assert [child.result() for child in reading] == [stream(0, 20)] * 2


def test_a_slow_reader_holds_the_producers_back(path):
    ours = Ring.create(path, RingShape(3, SLOT_BYTES, 2), PATIENCE_S)
    readers = [Ring(path), Ring(path)]
    assert [reader.register_reader(number) for number, reader in enumerate(readers)] == [0, 0]
    for position in range(3):
        assert ours.claim(1) == position
        fill(ours, position)
        assert readers[0].read(position, 1).tobytes() == content(position)
        readers[0].release(position)
    with pytest.raises(RingTimeoutError, match=r"position 0 is still needed by reader 1, within 0\.1 s"):
        ours.claim(0.1)
    readers[1].read(0, 1)
    with pytest.raises(RingTimeoutError, match="position 0 is still needed"):
        ours.claim(0.1)
    readers[1].release(0)
    assert ours.claim(1) == 3


def test_positions_published_in_any_order_are_taken_in_order(path):
    ours = Ring.create(path, RingShape(3, SLOT_BYTES, 1), PATIENCE_S)
    ours.register_reader(0)
    assert [ours.claim(1) for _ in range(3)] == [0, 1, 2]
    fill(ours, 2)
    fill(ours, 1)
    with pytest.raises(RingTimeoutError, match="position 0 has not been published"):
        ours.read(0, 0.05)
    fill(ours, 0)
    assert [ours.read(position, 1).tobytes() for position in range(3)] == [content(p) for p in range(3)]


def test_a_position_is_kept_until_all_before_it_are_released_too(path):
    ours = Ring.create(path, RingShape(2, SLOT_BYTES, 1), PATIENCE_S)
    ours.register_reader(0)
    for position in range(2):
        ours.claim(1)
        fill(ours, position)
        ours.read(position, 1)
    ours.release(1)
    with pytest.raises(RingTimeoutError, match="position 0 is still needed by reader 0"):
        ours.claim(0.05)
    ours.release(0)
    assert [ours.claim(1), ours.claim(1)] == [2, 3]


def test_a_reader_may_pass_positions_over(path):
    ours = Ring.create(path, RingShape(2, SLOT_BYTES, 1), PATIENCE_S)
    ours.register_reader(0)
    producing = Child(produce, path, 6)
    assert ours.read(4, PATIENCE_S).tobytes() == content(4)
    assert ours.read(5, PATIENCE_S).tobytes() == content(5)
    assert producing.result() is None


def test_bytes_are_read_where_they_were_written(path):
    ours = Ring.create(path, RingShape(1, SLOT_BYTES, 1), PATIENCE_S)
    ours.register_reader(0)
    ours.claim(1)
    buffer = ours.buffer(0)
    assert (buffer.dtype, buffer.shape) == (np.uint8, (SLOT_BYTES,))
    fill(ours, 0)
    view = Ring(path)._slot(0, 4)
    taken = ours.read(0, 1)
    ours.release(0)
    ours.claim(1)
    ours.buffer(1)[:4] = [4, 3, 2, 1]
    assert taken[:4].tolist() == view.tolist() == [4, 3, 2, 1]
    with pytest.raises(ValueError, match="read-only"):
        taken[0] = 1


# Readers that join late, leave or are killed


def test_nothing_is_overwritten_before_all_readers_have_joined(path):
    Ring.create(path, RingShape(2, SLOT_BYTES, 2), PATIENCE_S)
    reading = Child(read, path, 0, 10)
    producing = Child(produce, path, 10)
    assert not producing.has_sent(0.3)
    assert read(path, 1, 10) == stream(0, 10)
    assert reading.result() == stream(0, 10)
    assert producing.result() is None


def test_a_late_reader_starts_at_the_oldest_position_left(path):
    ours = Ring.create(path, RingShape(3, SLOT_BYTES, 2), 0.0)
    ours.register_reader(0)
    for position in range(7):
        assert ours.claim(1) == position
        fill(ours, position)
        ours.read(position, 1)
        ours.release(position)
    late = Ring(path)
    assert late.register_reader(1) == 4
    assert late.read(4, 1).tobytes() == content(4)
    with pytest.raises(RingTimeoutError, match="position 4 is still needed by reader 1"):
        ours.claim(0.1)


def test_without_any_reader_nothing_is_overwritten(path):
    ours = Ring.create(path, RingShape(2, SLOT_BYTES, 1), 0.0)
    for position in range(2):
        ours.claim(1)
        fill(ours, position)
    with pytest.raises(RingTimeoutError, match="no reader is there"):
        ours.claim(0.1)
    assert ours.register_reader(0) == 0


def test_readers_that_leave_are_not_waited_for(path):
    ours = Ring.create(path, RingShape(1, SLOT_BYTES, 2), PATIENCE_S)
    readers = [Ring(path), Ring(path)]
    for number, reader in enumerate(readers):
        reader.register_reader(number)
    ours.claim(1)
    fill(ours, 0)
    readers[0].unregister_reader()
    with pytest.raises(RingTimeoutError, match="position 0 is still needed by reader 1"):
        ours.claim(0.05)
    readers[1].read(0, 1)
    readers[1].release(0)
    assert ours.claim(1) == 1
    fill(ours, 1)
    readers[1].unregister_reader()
    assert ours.claim(1) is None


def test_a_reader_leaving_during_the_check_is_not_counted_dead(path, monkeypatch):
    ours = Ring.create(path, RingShape(1, SLOT_BYTES, 1), PATIENCE_S)
    reader = Ring(path)
    reader.register_reader(0)
    fill(ours, ours.claim(1))

    def too_late(_byte):
        reader.unregister_reader()
        return False

    monkeypatch.setattr(ours._locks, "held_by_another", too_late)
    assert ours.claim(1) is None


def hold(path, number, send):
    """Take the first position and never release it."""
    reader = Ring(path)
    position = reader.register_reader(number)
    reader.read(position, PATIENCE_S)
    send(position)
    sleep_forever()


def test_a_killed_reader_is_dropped_and_may_join_again(path):
    Ring.create(path, RingShape(2, SLOT_BYTES, 2), PATIENCE_S)
    stuck = Child(hold, path, 1)
    reading = Child(read, path, 0, 12)
    producing = Child(produce, path, 12)
    assert stuck.result() == 0
    assert not producing.has_sent(0.2)
    stuck.kill()
    assert reading.result() == stream(0, 12)
    assert producing.result() is None
    assert read(path, 1, 12) == stream(10, 12)


def test_a_ring_is_neglected_with_a_claimable_position(path):
    ours = Ring.create(path, RingShape(1, SLOT_BYTES, 2), PATIENCE_S)
    ours.register_reader(0)
    assert ours.is_neglected()
    producer = Child(claim_some, path, 1)
    assert producer.result() == [0]
    assert not ours.is_neglected()
    producer.kill()
    assert ours.is_neglected()
    ours.claim(1)
    fill(ours, 0)
    slow = Child(hold, path, 1)
    assert slow.result() == 0
    ours.read(0, 1)
    ours.release(0)
    assert not ours.is_neglected()
    slow.kill()
    assert ours.is_neglected()


def hold_with_child(path, number, send):
    """As `hold`, with a child, whose pid is sent, that outlives this process."""
    reader = Ring(path)
    reader.read(reader.register_reader(number), PATIENCE_S)
    if pid := os.fork():
        send(pid)
    sleep_forever()


def test_a_child_of_a_dead_reader_does_not_keep_its_place(path):
    ours = Ring.create(path, RingShape(1, SLOT_BYTES, 1), PATIENCE_S)
    ours.claim(1)
    fill(ours, 0)
    stuck = Child(hold_with_child, path, 0)
    orphan = stuck.result()
    try:
        with pytest.raises(RingTimeoutError, match="position 0 is still needed by reader 0"):
            ours.claim(0.1)
        stuck.kill()
        assert ours.register_reader(0) == 0
        ours.read(0, 1)
        ours.release(0)
        assert ours.claim(1) == 1
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_number_is_one_readers_at_a_time(path):
    first = Ring.create(path, RingShape(1, SLOT_BYTES, 2), PATIENCE_S)
    second = Ring(path)
    first.register_reader(1)
    with pytest.raises(LockedError, match=r"reader 1 of .* exists already"):
        second.register_reader(1)
    first.close()
    assert second.register_reader(1) == 0


# Producers that are killed


def claim_some(path, positions, send):
    """Claim so many positions, fill half of the last one, and stay."""
    ring = Ring(path)
    claims = [ring.claim(PATIENCE_S) for _ in range(positions)]
    ring.buffer(claims[-1])[:50] = 77
    send(claims)
    sleep_forever()


def test_a_claim_of_a_dead_producer_passes_to_another(path):
    ours = Ring.create(path, RingShape(4, SLOT_BYTES, 1), PATIENCE_S)
    stuck = Child(claim_some, path, 2)
    assert stuck.result() == [0, 1]
    assert ours.claim(1) == 2
    fill(ours, 2)
    stuck.kill()
    reading = Child(read, path, 0, 9)
    assert [ours.claim(1), ours.claim(1), ours.claim(1)] == [0, 1, 3]
    for position in (3, 1, 0):
        fill(ours, position)
    produce(path, 9)
    assert reading.result() == stream(0, 9)


def take_the_turn(path, send):
    with Ring(path)._turn(ring._Waiting(path, PATIENCE_S)):
        send("mine")
        sleep_forever()


def test_the_lock_of_claims_times_out_and_dies_with_its_holder(path):
    ours = Ring.create(path, RingShape(1, SLOT_BYTES, 1), PATIENCE_S)
    holder = Child(take_the_turn, path)
    assert holder.result() == "mine"
    with pytest.raises(RingTimeoutError, match=r"holds the lock of claims, within 0\.1 s"):
        ours.claim(0.1)
    holder.kill()
    assert ours.claim(1) == 0


def test_a_stream_completes_while_producers_are_killed(path):
    Ring.create(path, RingShape(4, SLOT_BYTES, 2), PATIENCE_S)
    reading = [Child(read, path, 0, 400), Child(read, path, 1, 400, 0.001)]
    for moment in range(12):
        doomed = [Child(produce, path, 400), Child(produce, path, 400)]
        time.sleep(0.003 * moment)
        for child in doomed:
            child.kill()
    produce(path, 400)
    assert [child.result() for child in reading] == [stream(0, 400)] * 2


def test_a_position_published_during_the_check_is_not_claimed(path, monkeypatch):
    ours = Ring.create(path, RingShape(4, SLOT_BYTES, 1), PATIENCE_S)
    other = Ring(path)
    other.claim(1)

    def too_late(position):
        fill(other, position)
        return False

    monkeypatch.setattr(ours, "_is_held", too_late)
    assert ours.claim(1) == 1


def test_where_memory_does_not_suffice_the_ring_is_refused(path, monkeypatch):
    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransientInputError, match=r"a ring needs .* MiB, and .* MiB free"):
        Ring.create(path, RingShape(4, SLOT_BYTES, 1), PATIENCE_S)


# Misuse


def as_inherited(ours, send):
    for use in (lambda: ours.claim(1), ours.unregister_reader):
        with pytest.raises(BadInputError, match="before this process was forked"):
            use()
    send("refused")


def test_a_forked_child_must_open_the_ring_again(path):
    ours = Ring.create(path, RingShape(2, SLOT_BYTES, 1), PATIENCE_S)
    ours.register_reader(0)
    ours.claim(1)
    assert Child(as_inherited, ours).result() == "refused"
    fill(ours, 0)
    assert ours.read(0, 1).tobytes() == content(0)


def test_a_ring_is_private_and_its_folder_holds_nothing_else(path):
    before = os.umask(0)
    try:
        Ring.create(path, RingShape(2, SLOT_BYTES, 1), PATIENCE_S)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def create_and_claim(path, shape, send):
    ring = Ring.create(path, shape, PATIENCE_S)
    send(ring.claim(PATIENCE_S))
    sleep_forever()


def test_concurrent_creators_get_the_same_ring(path):
    together = [Child(create_and_claim, path, RingShape(4, SLOT_BYTES, 1)) for _ in range(4)]
    assert sorted(child.result() for child in together) == [0, 1, 2, 3]
    for child in together:
        child.kill()


def test_another_shape_is_refused(path):
    Ring.create(path, RingShape(2, SLOT_BYTES, 1), PATIENCE_S)
    with pytest.raises(TransientInputError, match="has another shape"):
        Ring.create(path, RingShape(2, SLOT_BYTES, 2), PATIENCE_S)


@pytest.mark.parametrize("text", [b"", b"x" * 100, bytes(8192), b"hetring2" + b"\x01" * 8184])
def test_another_file_is_no_ring(path, text):
    path.write_bytes(text)
    with pytest.raises(TransientInputError, match=r"is no ring|is empty"):
        Ring(path)


# Killed before any line of the ring's


def _traced(line, function, *arguments):
    """Return how many lines a function takes; die before one of them, if it is given."""
    lines = 0

    def of_line(_frame, event, _argument):
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return of_line

    def of_call(frame, _event, _argument):
        return of_line if frame.f_code.co_filename in TRACED else None

    sys.settrace(of_call)
    function(*arguments)
    sys.settrace(None)
    return lines


def killed(path, shape, kills, prepare, function, *arguments):
    """Run a function on new rings, and kill it before ever later lines; the rings, in turn."""
    prepare(path)
    lines = Child(_traced, None, function, path, *arguments).result()
    path.unlink()
    for line in sorted({1 + index * lines // kills for index in range(kills)}):
        prepare(path)
        child = Child(_traced, line, function, path, *arguments)
        child.process.join()
        assert child.process.exitcode == -signal.SIGKILL
        yield Ring.create(path, shape, 0.0)
        path.unlink()


def test_a_producer_killed_at_any_line_costs_nothing(path):
    shape = RingShape(4, SLOT_BYTES, 1)
    for _ in killed(path, shape, 3 * KILLS, lambda path: Ring.create(path, shape, 0.0), produce, 3):
        produce(path, 4)
        assert read(path, 0, 4) == stream(0, 4)


def test_a_reader_killed_at_any_line_does_not_block_others(path):
    shape = RingShape(3, SLOT_BYTES, 2)

    def three(path):
        with closing(Ring.create(path, shape, 0.0)) as ring:
            for _ in range(3):
                fill(ring, ring.claim(1))

    for ours in killed(path, shape, 2 * KILLS, three, read, 1, 3):
        ours.register_reader(0)
        for position in range(8):
            assert ours.read(position, 1).tobytes() == content(position)
            ours.release(position)
            fill(ours, ours.claim(1))
        again = Ring(path)
        assert again.register_reader(1) == 8


def create_only(path, shape):
    Ring.create(path, shape, 0.0)


def test_a_killed_creator_leaves_a_complete_ring_or_none(path):
    shape = RingShape(2, SLOT_BYTES, 1)
    for ours in killed(path, shape, KILLS, lambda _path: None, create_only, shape):
        fill(ours, ours.claim(1))
        assert read(path, 0, 1) == stream(0, 1)


# Which positions may be claimed


class Model:
    """A ring without files: the words, and the claims of producers that live."""

    def __init__(self, slots, readers):
        self.claimed, self.published, self.readers = [0] * slots, [0] * slots, [AWAITED] * readers
        self.held, self.awaiting = [], True

    @property
    def cursors(self):
        return Cursors(self.claimed, self.published, self.readers)

    def living(self):
        return [number for number, word in enumerate(self.readers) if AWAITED < word < DROPPED]

    def claim(self, _which):
        position = next_claim(self.cursors, self.held, self.awaiting)
        if isinstance(position, int):
            assert position not in self.held
            self.claimed[position % len(self.claimed)] = position + 1
            self.held.append(position)
        return position

    def publish(self, which):
        if self.held:
            position = self.held.pop(which % len(self.held))
            self.published[position % len(self.claimed)] = position + 1

    def die(self, which):
        if self.held:
            self.held.pop(which % len(self.held))

    def advance(self, which):
        if living := self.living():
            number = living[which % len(living)]
            position = self.readers[number] - 1
            self.readers[number] += self.published[position % len(self.claimed)] == position + 1

    def join(self, which):
        number = which % len(self.readers)
        if number not in self.living():
            self.readers[number] = self.cursors.oldest + 1

    def drop(self, which):
        if living := self.living():
            self.readers[living[which % len(living)]] = DROPPED

    def leave(self, which):
        if living := self.living():
            self.readers[living[which % len(living)]] = LEFT

    def wait_no_more(self, _which):
        self.awaiting = False

    def check(self):
        cursors = self.cursors
        window = range(cursors.oldest, cursors.next)
        assert all(self.claimed[position % len(self.claimed)] == position + 1 for position in window)
        assert all(cursors.oldest < self.readers[number] <= cursors.next + 1 for number in self.living())
        assert cursors.oldest == 0 or not self.awaiting or AWAITED not in self.readers


STEPS = st.sampled_from([*["claim", "advance"] * 3, "publish", "publish", "join", "die"])
TURNS = st.sampled_from(["drop", "leave", "wait_no_more"])


@given(
    slots=st.integers(1, 5),
    readers=st.integers(1, 4),
    steps=st.lists(st.tuples(STEPS | STEPS | STEPS | TURNS, st.integers(0, 11)), max_size=120),
)
def test_no_claim_overwrites_needed_positions_or_blocks(slots, readers, steps):
    model = Model(slots, readers)
    for name, which in steps:
        getattr(model, name)(which)
        model.check()
    model.awaiting = False
    while model.held:
        model.publish(0)
    for number in range(len(model.living())):
        for _ in range(slots):
            model.advance(number)
    outcome = model.claim(0)
    model.check()
    left_over = [c for c, p in zip(model.claimed, model.published, strict=True) if c != p]
    assert isinstance(outcome, int) or not model.living()
    assert (outcome is None) == (not left_over and set(model.readers) == {LEFT})


def test_positions_of_a_dead_producer_come_first():
    cursors = Cursors(claimed=[5, 6, 7, 4], published=[5, 2, 7, 4], readers=[6])
    assert next_claim(cursors, [], False) == 5
    assert next_claim(cursors, [5], False) == 7
    assert next_claim(Cursors([5, 6, 7, 8], [5, 2, 7, 8], [6]), [5], False) == 8


def test_a_position_skipped_by_readers_is_still_awaited():
    cursors = Cursors(claimed=[9, 6, 7, 8], published=[9, 2, 7, 8], readers=[8])
    assert next_claim(cursors, [5], False) == "its slot's last position, 5, has not been published yet"
