"""The node-local store of prepared samples, with real processes that are killed at any moment."""

import os
import random
import signal
import stat
import sys
import time
from collections import Counter
from contextlib import closing, suppress
from multiprocessing import get_context

import numpy as np
import pytest

from hetctl.model.errors import BadInputError, HetctlError, LockedError
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


def opened(path, spec=SPEC, samples=SAMPLES, fingerprint="digits"):
    return closing(SampleStore(path, spec, samples, fingerprint))


def assert_whole(store, numbers, spec=SPEC):
    for number in numbers:
        x, y = store.view(number)
        assert (x.shape, x.dtype) == (spec.x_shape, spec.x_dtype)
        assert y == number
        assert (x == number + 0.5).all()


def fill(store, numbers, prepare=sample, **how):
    for number in numbers:
        store.fill(number, prepare, **how)


def ready(store, samples=SAMPLES):
    """Return the numbers of the samples that can be read."""
    found = []
    for number in range(samples):
        with suppress(HetctlError):
            store.view(number)
            found.append(number)
    return found


@pytest.fixture
def path(tmp_path):
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


def fill_all(path, order, prepare, spec=SPEC):
    with opened(path, spec, len(order)) as store:
        fill(store, order, prepare)
        assert_whole(store, order, spec)


def test_samples_are_ready_as_soon_as_they_are_prepared(path):
    with opened(path) as store:
        assert ready(store) == []
        fill(store, [7, 3, 7, 31])
        assert ready(store) == [3, 7, 31]
        assert_whole(store, [31, 7, 3, 7])
        with pytest.raises(ValueError, match="read-only"):
            store.view(3)[0][:] = 0
    with opened(path) as store:
        assert_whole(store, [31, 3])


def test_the_file_is_private_and_has_all_of_its_space(path):
    with opened(path, samples=5000):
        status = path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
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
    with opened(path) as store:
        assert_whole(store, range(SAMPLES))


def test_a_sample_of_another_process_is_awaited(path, tmp_path):
    notes = tmp_path / "notes"
    other = started(fill_all, path, range(1), counting(notes, 0.3))
    with opened(path, samples=1) as store:
        while not notes.exists():
            time.sleep(0.01)
        assert ready(store, 1) == []
        store.fill(0, counting(notes))
        assert_whole(store, [0])
    other.join(PATIENCE_S)
    assert other.exitcode == 0
    assert notes.read_text() == "0\n"


def test_a_sample_prepared_before_the_claim_stays_as_it_is(path, monkeypatch):
    with opened(path) as store, opened(path) as other:

        def late(claims, number):
            monkeypatch.undo()
            other.fill(number, sample)
            return claims.acquire(number)

        monkeypatch.setattr(module.ByteLocks, "acquire", late)
        store.fill(3, lambda number: pytest.fail(f"{number} is prepared twice"))
        assert_whole(store, [3])


def test_waiting_for_a_sample_ends_with_the_patience(path, tmp_path):
    notes = tmp_path / "notes"
    other = started(fill_all, path, range(4), counting(notes, 3600.0))
    with opened(path, samples=4) as store:
        while not notes.exists():
            time.sleep(0.01)
        with pytest.raises(LockedError, match=r"sample 0 is being prepared by another process.* 0\.1 s"):
            store.fill(0, sample, patience_s=0.1)
        fill(store, [1, 2, 3])
        assert_whole(store, [1, 2, 3])
        other.kill()
        store.fill(0, sample, patience_s=PATIENCE_S)
        assert_whole(store, range(4))
    other.join()


def test_a_failed_sample_can_be_prepared_by_others(path):
    def broken(number):
        raise BadInputError(f"file {number}")

    with opened(path) as store:
        with pytest.raises(BadInputError, match="file 3"):
            store.fill(3, broken)
        with pytest.raises(BadInputError, match=r"sample 3 has shape \(3,\)"):
            store.fill(3, lambda _number: (np.zeros(3, np.float32), np.int64(1)))
        with pytest.raises(HetctlError, match="sample 3 is read before"):
            store.view(3)
        with opened(path) as second:
            second.fill(3, sample)
        assert_whole(store, [3])


LARGE = SampleSpec((400_000,), np.dtype("f4"), (), np.dtype("i8"))


def test_killed_at_any_moment_the_others_go_on(path):
    """Records so large that many of the kills come while one is written."""

    def prepare(number):
        return sample(number, LARGE)

    moments = random.Random(3)
    with opened(path, LARGE, SAMPLES) as store:
        for _ in range(8):
            victim = started(fill_all, path, moments.sample(range(SAMPLES), SAMPLES), prepare, LARGE)
            until = time.monotonic() + moments.uniform(0.0, 0.03)
            while time.monotonic() < until:
                assert_whole(store, ready(store), LARGE)
            victim.kill()
            victim.join()
        fill(store, range(SAMPLES), prepare, patience_s=PATIENCE_S)
        assert_whole(store, range(SAMPLES), LARGE)


def killed_before_line(path, line):
    """Fill a new store in a process that dies before its n-th line; return true if it was killed."""
    lines = iter(range(1, 10**9))

    def of_line(_frame, event, _argument):
        if event == "line" and next(lines) == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return of_line

    def work():
        sys.settrace(lambda frame, *_: of_line if frame.f_code.co_filename in TRACED else None)
        with opened(path, samples=2) as store:
            fill(store, [0, 1])

    victim = started(work)
    victim.join()
    assert victim.exitcode in (0, -signal.SIGKILL)
    return victim.exitcode != 0


def test_killed_at_any_line_the_store_is_whole_or_not_there(tmp_path):
    line = 1
    while killed_before_line(tmp_path / f"{line}", line):
        with opened(tmp_path / f"{line}", samples=2) as store:
            assert_whole(store, ready(store, 2))
            fill(store, [1, 0], patience_s=PATIENCE_S)
            assert_whole(store, [0, 1])
        line += 1
    assert line > 40


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "letters"},
        {"samples": SAMPLES + 1},
        {"spec": SampleSpec((3, 5), SPEC.x_dtype, (), SPEC.y_dtype)},
        {"spec": SampleSpec((5, 3), SPEC.x_dtype, (), np.dtype("u8"))},
    ],
)
def test_a_store_of_other_samples_is_refused(path, other):
    with opened(path) as store:
        store.fill(3, sample)
    with pytest.raises(BadInputError, match="holds other samples"):
        opened(path, **other)
    with opened(path) as store:
        assert_whole(store, [3])


def test_a_file_of_someone_else_is_left_alone(path):
    path.parent.mkdir()
    path.write_text("a diary")
    with pytest.raises(BadInputError, match="holds other samples"):
        opened(path)
    assert path.read_text() == "a diary"


@pytest.mark.parametrize("is_known", [True, False])
def test_too_little_space_leaves_no_file(path, monkeypatch, is_known):
    def full(_descriptor, _start, _size):
        raise OSError(28, "No space left on device")

    if is_known:
        monkeypatch.setattr(shared_file, "_free_bytes", lambda _folder: 2**20)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BadInputError, match=r"prepared samples needs 69\.6 MiB, and .*store has .* free"):
        opened(path, samples=1_000_000)
    assert list(path.parent.iterdir()) == []
