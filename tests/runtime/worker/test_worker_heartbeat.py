"""The pulse of a member in training: fresh, whole, and gone when training is over."""

from __future__ import annotations

import json
import math
import time

import pytest

from hetctl.model.serialization import encode
from hetctl.model.training_progress import Heartbeat
from hetctl.runtime.worker import heartbeat
from hetctl.storage.heartbeats import STALE_S, read_heartbeats, write_heartbeats

PULSE = Heartbeat(time=1000.0, epoch=2, position=50, samples=100, rate=25.0, loss=0.5, busy=0.75)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.05)


def wait_for(condition):
    end = time.monotonic() + 5
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


def test_a_pulse_tells_where_training_is_and_how_fast_it_goes():
    sent = []
    with heartbeat.beating(sent.append, 100, lambda: 0.25) as note:
        note(3, 90, None)
        time.sleep(0.1)
        note(4, 10, 0.125)  # 20 samples later, in the next epoch
        pulse = wait_for(lambda: next((p for p in sent if p.epoch == 4), None))
        assert (pulse.position, pulse.samples, pulse.loss, pulse.busy) == (10, 100, 0.125, 0.25)
        assert 20 / 0.5 < pulse.rate < 20 / 0.04
        wait_for(lambda: sent[-1].rate == 0)
    number = len(sent)
    time.sleep(0.15)
    assert len(sent) == number


@pytest.mark.parametrize("loss", [math.nan, math.inf, "much", object()])
def test_a_loss_that_is_no_number_is_left_out(loss):
    sent = []
    with heartbeat.beating(sent.append, 100, lambda: None) as note:
        note(1, 10, loss)
        assert wait_for(lambda: sent)[0].loss is None


def test_a_pulse_that_cannot_be_sent_does_not_end_training():
    tried = []

    def refuse(pulse):
        tried.append(pulse)
        raise ConnectionResetError

    with heartbeat.beating(refuse, 100, lambda: None) as note:
        note(1, 10, 0.5)
        wait_for(lambda: len(tried) > 1)


def test_the_share_of_the_cores_that_is_used_is_measured():
    busy = heartbeat.cores_used()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert 0 < busy() <= 1


def test_without_a_gpu_nobody_knows_its_use(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    assert heartbeat.gpu_used(0)() is None


def test_only_fresh_and_whole_pulses_are_read(tmp_path):
    path = tmp_path / "pulses.json"
    assert read_heartbeats(path, 1000.0) == {}
    write_heartbeats(path, {"m": PULSE})
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_heartbeats(path, 1000.0 + STALE_S / 2) == {"m": PULSE}
    assert read_heartbeats(path, 1000.0 + STALE_S) == {}
    path.write_text(json.dumps({"m": {**encode(PULSE), "rate": math.inf}, "n": encode(PULSE)}))
    assert read_heartbeats(path, 1000.0) == {"n": PULSE}
    path.write_text(json.dumps({"m": encode(PULSE)})[:-5])
    assert read_heartbeats(path, 1000.0) == {}
