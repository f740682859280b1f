"""The log of a long training: whole at first, and thinner as it grows."""

from __future__ import annotations

import pytest

from hetctl.methods.balance.manager import Observation
from hetctl.methods.balance.managers import make_manager
from hetctl.methods.balance.observation_log import ManagerStart, logged, records_in, replay
from hetctl.model.training_settings import ON, BalanceSettings
from hetctl.runtime.worker.balancing import BalanceLog, logging_interval

SETTINGS, BATCHES = BalanceSettings(ON, "curve"), (32, 32)
WORKERS = ("a:0", "b:0")
FULL_LOG_BYTES = 8000


@pytest.fixture
def log(tmp_path):
    return tmp_path / "balance" / "m.jsonl"


def train(log, manager, first, last, full_log_bytes=FULL_LOG_BYTES):
    """Log iterations of a manager as one process does."""
    recorder = BalanceLog(log, full_log_bytes)
    recorder.add(ManagerStart(SETTINGS, WORKERS, manager.batches, 3, first))
    for number in range(first, last):
        seen = [Observation(b, s * b) for b, s in zip(manager.batches, (0.001, 0.003), strict=True)]
        recorder.add(logged(float(number), number, seen, manager.update(seen)))
    recorder.flush()


def replayed(log):
    with log.open() as lines:
        return replay(records_in(lines))


def test_a_short_log_has_all_iterations(log):
    train(log, make_manager(SETTINGS, BATCHES, (), 3), 0, 100, full_log_bytes=10**6)
    found = replayed(log)
    assert (found.repeated, len(found.iterations), found.difference) == (100, 100, None)


def test_a_long_log_is_thinner_and_its_beginning_is_repeated(log):
    manager = make_manager(SETTINGS, BATCHES, (), 3)
    train(log, manager, 0, 5000)
    found = replayed(log)
    assert log.stat().st_size < 2 * FULL_LOG_BYTES
    assert found.difference is None
    whole = found.repeated
    assert 0.5 * FULL_LOG_BYTES < sum(map(len, log.read_text().splitlines()[:whole])) < FULL_LOG_BYTES
    times = [one.time for one in found.iterations]
    assert times[:whole] == [*range(whole)]
    gaps = [later - time for time, later in zip(times[whole:], times[whole + 1 :], strict=False)]
    assert gaps[0] == 16
    assert gaps[1:] == sorted(gaps[1:])
    assert max(gaps) > 16
    train(log, manager, 5000, 9000)
    assert log.stat().st_size < 2 * FULL_LOG_BYTES
    again = replayed(log)
    assert (again.repeated, again.iterations[: len(times)]) == (whole, found.iterations)
    assert again.difference is None


def test_intervals_double_and_end_at_some_thousands():
    sizes = [*range(0, 30 * 800, 800)]
    found = [logging_interval(size, 6400) for size in sizes]
    assert found[:8] == [1] * 8
    assert found[8:12] == [16, 32, 64, 128]
    assert found[-1] == found[-2] == 2**14
