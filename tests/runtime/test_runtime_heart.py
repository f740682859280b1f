"""The pulse of a member in training: fresh, whole, and gone when training is over."""

from __future__ import annotations

import json
import math
import time

import pytest

from hetctl.core.codec import encode
from hetctl.core.pulse import STALE_S, Pulse, read_pulse
from hetctl.runtime import heart

PULSE = Pulse(time=1000.0, epoch=2, position=50, samples=100, rate=25.0, loss=0.5, busy=0.75)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(heart, "EVERY_S", 0.05)


def wait_for(condition):
    end = time.monotonic() + 5
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


def test_a_pulse_tells_where_training_is_and_how_fast_it_goes(tmp_path):
    path = tmp_path / "m.pulse"
    with heart.beating(path, 100, lambda: 0.25) as note:
        note(3, 90, None)
        time.sleep(0.1)
        note(4, 10, 0.125)  # 20 samples later, in the next epoch
        pulse = wait_for(lambda: (p := read_pulse(path)) and p.epoch == 4 and p)
        assert (pulse.position, pulse.samples, pulse.loss, pulse.busy) == (10, 100, 0.125, 0.25)
        assert 20 / 0.5 < pulse.rate < 20 / 0.04
        assert path.stat().st_mode & 0o777 == 0o600
        wait_for(lambda: read_pulse(path).rate == 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, "much", object()])
def test_a_loss_that_is_no_number_is_left_out(tmp_path, loss):
    path = tmp_path / "m.pulse"
    with heart.beating(path, 100, lambda: None) as note:
        note(1, 10, loss)
        assert wait_for(lambda: read_pulse(path)).loss is None


def test_a_pulse_that_cannot_be_written_does_not_end_training(tmp_path):
    with heart.beating(tmp_path / "gone" / "m.pulse", 100, lambda: None) as note:
        note(1, 10, 0.5)
        time.sleep(0.2)


def test_the_share_of_the_cores_that_is_used_is_measured():
    busy = heart.cores_used()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert 0 < busy() <= 1


def test_without_a_gpu_nobody_knows_its_use(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert heart.gpu_used()() is None


def test_only_a_fresh_and_whole_pulse_is_read(tmp_path):
    path = tmp_path / "m.pulse"
    assert read_pulse(path, 1000.0) is None
    path.write_text(json.dumps(encode(PULSE)))
    assert read_pulse(path, 1000.0 + STALE_S / 2) == PULSE
    assert read_pulse(path, 1000.0 + STALE_S) is None
    path.write_text(json.dumps(encode(PULSE))[:-5])
    assert read_pulse(path, 1000.0) is None
    path.write_text(json.dumps({**encode(PULSE), "rate": math.inf}))
    assert read_pulse(path, 1000.0) is None
