"""The node-local store of prepared samples, with real processes that are killed at any moment."""

import os
import random
import signal
import stat
import sys
import time
from collections import Counter
from multiprocessing import get_context

import numpy as np
import pytest

from hetctl.model.errors import BadInputError, LockedError, TransientInputError
from hetctl.runtime.data.sharing import shared_file
from hetctl.runtime.data.sharing import store as module
from hetctl.runtime.data.sharing.store import SampleStore
from hetctl.runtime.data.sources import SampleSpec

FORK = get_context("fork")
SPEC = SampleSpec((5, 3), np.dtype("f4"), (), np.dtype("i8"))
SAMPLES = 40
PATIENCE_S = 60.0
TRACED = {module.__file__, shared_file.__file__}


def sample(number, spec=SPEC):
    return np.full(spec.x_shape, number + 0.5, spec.x_dtype), np.asarray(number, spec.y_dtype)


class Numbered:
    """Samples that tell their numbers, prepared by any function."""

    def __init__(self, spec, samples, prepare):
        self.spec, self.samples = spec, samples
        self.prepare = prepare or (lambda number: sample(number, spec))

    def __len__(self):
        return self.samples


def opened(path, prepare=None, spec=SPEC, samples=SAMPLES, name="digits", samples_s=PATIENCE_S):
    return SampleStore(Numbered(spec, samples, prepare), path, name, samples_s)


def assert_whole(store, numbers):
    for number in numbers:
        assert store._states[number] == module.READY
        x, y = store.prepare(number)
        assert (x.shape, x.dtype) == (store.spec.x_shape, store.spec.x_dtype)
        assert y == number
        assert (x == number + 0.5).all()


def fill(store, numbers):
    for number in numbers:
        store.prepare(number)


def ready(store):
    """Return the numbers of the samples that are prepared."""
    return np.flatnonzero(store._states).tolist()


@pytest.fixture
def path(tmp_path):
    (tmp_path / "store").mkdir()
    return tmp_path / "store" / "training"


def counting(file, pause_s=0.0):
    """Return a function that prepares a sample and records its number in a file."""

    def prepare(number):
        with file.open("a") as notes:
            notes.write(f"{number}\n")
        time.sleep(pause_s)
        return sample(number)

    return prepare


def started(work, *arguments):
    process = FORK.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def fill_all(path, order, prepare=None, spec=SPEC):
    store = opened(path, prepare, spec, len(order))
    fill(store, order)
    assert_whole(store, order)


def test_samples_are_ready_as_soon_as_they_are_prepared(path):
    store = opened(path)
    assert ready(store) == []
    fill(store, [7, 3, 7, 31])
    assert ready(store) == [3, 7, 31]
    assert_whole(store, [31, 7, 3, 7])
    with pytest.raises(ValueError, match="read-only"):
        store.prepare(3)[0][:] = 0
    assert_whole(opened(path), [31, 3])


def test_the_file_is_private_and_has_all_of_its_space(path):
    opened(path, samples=5000)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= status.st_size > 5000 * SPEC.record.itemsize


def test_four_processes_prepare_every_sample_once(path, tmp_path):
    notes = tmp_path / "notes"
    orders = [random.Random(seed).sample(range(SAMPLES), SAMPLES) for seed in range(3)]
    orders.append(orders[0])
    processes = [started(fill_all, path, order, counting(notes, 0.002)) for order in orders]
    for process in processes:
        process.join(PATIENCE_S)
        assert process.exitcode == 0
    assert Counter(notes.read_text().split()) == Counter(map(str, range(SAMPLES)))
    assert_whole(opened(path), range(SAMPLES))


def test_a_sample_of_another_process_is_awaited(path, tmp_path):
    notes = tmp_path / "notes"
    other = started(fill_all, path, range(1), counting(notes, 0.3))
    store = opened(path, counting(notes), samples=1)
    while not notes.exists():
        time.sleep(0.01)
    assert ready(store) == []
    fill(store, [0])
    assert_whole(store, [0])
    other.join(PATIENCE_S)
    assert other.exitcode == 0
    assert notes.read_text() == "0\n"


def test_a_sample_prepared_before_the_claim_stays_as_it_is(path, monkeypatch):
    store, other = opened(path, lambda number: pytest.fail(f"{number} is prepared twice")), opened(path)

    def late(claims, number):
        monkeypatch.undo()
        other.prepare(number)
        return claims.acquire(number)

    monkeypatch.setattr(module.ByteLocks, "acquire", late)
    fill(store, [3])
    assert_whole(store, [3])


def test_waiting_for_a_sample_ends_with_the_patience(path, tmp_path):
    notes = tmp_path / "notes"
    other = started(fill_all, path, range(4), counting(notes, 3600.0))
    store = opened(path, samples=4)
    while not notes.exists():
        time.sleep(0.01)
    with pytest.raises(LockedError, match=r"sample 0 is being prepared by another process.* 0\.1 s"):
        opened(path, samples=4, samples_s=0.1).prepare(0)
    fill(store, [1, 2, 3])
    assert_whole(store, [1, 2, 3])
    other.kill()
    fill(store, [0])
    assert_whole(store, range(4))
    other.join()


def test_a_failed_sample_can_be_prepared_by_others(path):
    def broken(number):
        if number == 3:
            raise BadInputError(f"file {number}")
        return np.zeros(3, np.float32), np.int64(1)

    store = opened(path, broken)
    with pytest.raises(BadInputError, match="file 3"):
        store.prepare(3)
    with pytest.raises(BadInputError, match=r"sample 4 has shape \(3,\)"):
        store.prepare(4)
    assert ready(store) == []
    fill(opened(path), [3, 4])
    assert_whole(store, [3, 4])


LARGE = SampleSpec((400_000,), np.dtype("f4"), (), np.dtype("i8"))


def test_killed_at_any_moment_the_others_go_on(path):
    """Records so large that many of the kills come while one is written."""
    moments = random.Random(3)
    store = opened(path, spec=LARGE)
    for _ in range(8):
        victim = started(fill_all, path, moments.sample(range(SAMPLES), SAMPLES), None, LARGE)
        until = time.monotonic() + moments.uniform(0.0, 0.03)
        while time.monotonic() < until:
            assert_whole(store, ready(store))
        victim.kill()
        victim.join()
    fill(store, range(SAMPLES))
    assert_whole(store, range(SAMPLES))


def killed_before_line(path, line):
    """Fill a new store in a process that dies before its n-th line; return true if it was killed."""
    lines = iter(range(1, 10**9))

    def of_line(_frame, event, _argument):
        if event == "line" and next(lines) == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return of_line

    def work():
        sys.settrace(lambda frame, *_: of_line if frame.f_code.co_filename in TRACED else None)
        fill(opened(path, samples=2), [0, 1])

    victim = started(work)
    victim.join()
    assert victim.exitcode in (0, -signal.SIGKILL)
    return victim.exitcode != 0


def test_killed_at_any_line_the_store_is_whole_or_not_there(tmp_path):
    line = 1
    while killed_before_line(tmp_path / f"{line}", line):
        store = opened(tmp_path / f"{line}", samples=2)
        assert_whole(store, ready(store))
        fill(store, [1, 0])
        assert_whole(store, [0, 1])
        line += 1
    assert line > 40


@pytest.mark.parametrize(
    "other",
    [
        {"name": "letters"},
        {"samples": SAMPLES + 1},
        {"spec": SampleSpec((3, 5), SPEC.x_dtype, (), SPEC.y_dtype)},
        {"spec": SampleSpec((5, 3), SPEC.x_dtype, (), np.dtype("u8"))},
    ],
)
def test_a_store_of_other_samples_is_refused(path, other):
    fill(opened(path), [3])
    with pytest.raises(TransientInputError, match="holds other samples"):
        opened(path, **other)
    assert_whole(opened(path), [3])


def test_a_file_of_someone_else_is_left_alone(path):
    path.write_text("a diary")
    with pytest.raises(TransientInputError, match="holds other samples"):
        opened(path)
    assert path.read_text() == "a diary"


@pytest.mark.parametrize("is_known", [True, False])
def test_too_little_space_leaves_no_file(path, monkeypatch, is_known):
    def full(_descriptor, _start, _size):
        raise OSError(28, "No space left on device")

    if is_known:
        monkeypatch.setattr(shared_file, "_free_bytes", lambda _folder: 2**20)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        TransientInputError, match=r"prepared samples needs 69\.6 MiB, and .*store has .* free"
    ):
        opened(path, samples=1_000_000)
    assert list(path.parent.iterdir()) == []
