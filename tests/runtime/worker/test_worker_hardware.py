"""Peaks of memory, the load of a node, live metrics, and the memory of layers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hetctl.model.serialization import encode
from hetctl.model.training_progress import LiveMetrics
from hetctl.model.training_settings import FRAMEWORKS
from hetctl.runtime.worker import hardware
from hetctl.runtime.worker.hardware import (
    GpuMemory,
    MemoryGauge,
    NodeLoad,
    memory_of_commands,
    peak_gpu_memory,
    peak_memory,
    reset_peak_memory,
)
from hetctl.storage.run_files import STALE_S, read_live_metrics, write_live_metrics


class OnGpu:
    """A framework with bytes on its GPU, until the measurement begins anew."""

    def __init__(self, peak: int = 2**50) -> None:
        self.peak = peak

    def gpu_memory(self) -> int:
        return 2**51

    def peak_gpu_memory(self) -> int:
        return self.peak

    def reset_peak_memory(self) -> None:
        self.peak = 0


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_loaded_framework_tells_its_peak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in FRAMEWORKS.values():
        monkeypatch.delitem(sys.modules, entry.module, raising=False)
    reset_peak_memory()
    assert peak_gpu_memory() == 0
    # The process itself has more: its libraries and samples are in the node's memory.
    monkeypatch.setitem(sys.modules, FRAMEWORKS[name].module, SimpleNamespace(FRAMEWORK=OnGpu(2**10)))
    assert peak_gpu_memory() == peak_memory() == 2**10
    reset_peak_memory()
    assert peak_gpu_memory() == 0
    assert peak_memory() > 0


def test_the_load_is_of_the_last_steps_not_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = OnGpu()
    for entry in FRAMEWORKS.values():
        monkeypatch.delitem(sys.modules, entry.module, raising=False)
    monkeypatch.setitem(sys.modules, FRAMEWORKS["pytorch"].module, SimpleNamespace(FRAMEWORK=gpu))
    load = NodeLoad()
    assert load.sample()[1] == 0.5
    gpu.peak = 2**49
    assert load.sample()[1] == 0.25
    # A failure is still reported with the peak of the whole task.
    assert peak_gpu_memory() == 2**50
    reset_peak_memory()
    assert peak_gpu_memory() == 0


def test_no_framework_is_imported_to_be_asked() -> None:
    code = "from hetctl.runtime.worker import hardware as h; h.peak_memory(); import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "tensorflow", "keras"} & set(done.stdout.split())


PATIENCE_S = 60.0
EVERY_S = 0.05
LIVE_METRICS = LiveMetrics(
    time=1000.0, epoch=2, position=50, samples=100, rate=25.0, loss=0.5, gpu_busy_fraction=0.75
)


def wait_for(condition):
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


def sender():
    sent = []
    return sent, lambda metrics: sent.append(metrics)


def test_live_metrics_have_position_and_rate_since_the_last():
    sent = []
    with hardware.live_metrics_to(
        lambda metrics: sent.append(metrics), 100, lambda: 0.25, every_s=EVERY_S
    ) as note:
        note(3, 90, None)
        wait_for(lambda: sent)
        note(4, 10, 0.125)  # 20 samples later, in the next epoch
        first = wait_for(lambda: next((n for n, sign in enumerate(sent) if sign.epoch == 4), None))
        before, now = sent[first - 1 : first + 1]
        assert (now.position, now.samples, now.loss, now.gpu_busy_fraction) == (10, 100, 0.125, 0.25)
        assert now.rate == pytest.approx(20 / (now.time - before.time))
        wait_for(lambda: sent[-1].rate == 0)
    number = len(sent)
    time.sleep(0.15)
    assert len(sent) == number


@pytest.mark.parametrize("loss", [None, math.nan, math.inf, "much", object()])
def test_a_loss_that_is_no_number_is_left_out(loss):
    sent = []
    with hardware.live_metrics_to(
        lambda metrics: sent.append(metrics), 100, lambda: None, every_s=EVERY_S
    ) as note:
        note(1, 10, loss)
        assert wait_for(lambda: sent)[0].loss is None


def test_live_metrics_that_cannot_be_sent_do_not_end_training():
    tried = []

    def refuse(metrics):
        tried.append(metrics)
        raise ConnectionResetError

    with hardware.live_metrics_to(refuse, 100, lambda: None, every_s=EVERY_S) as note:
        note(1, 10, 0.5)
        wait_for(lambda: len(tried) > 1)


def test_the_share_of_the_cores_that_is_used_is_measured():
    busy = hardware.busy_share(None)
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert 0 < busy() <= 1


def test_the_use_of_a_gpu_is_unknown_without_a_gpu(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    assert hardware.busy_share(0)() is None


def test_only_recent_and_complete_live_metrics_are_read(tmp_path):
    path = tmp_path / "metrics.json"
    assert read_live_metrics(path, 1000.0) == {}
    write_live_metrics(path, {"m": LIVE_METRICS})
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_live_metrics(path, 1000.0 + STALE_S / 2) == {"m": LIVE_METRICS}
    assert read_live_metrics(path, 1000.0 + STALE_S) == {}
    path.write_text(json.dumps({"m": {**encode(LIVE_METRICS), "rate": math.inf}, "n": encode(LIVE_METRICS)}))
    assert read_live_metrics(path, 1000.0) == {"n": LIVE_METRICS}
    path.write_text(json.dumps({"m": encode(LIVE_METRICS)})[:-5])
    assert read_live_metrics(path, 1000.0) == {}


INPUTS = np.random.default_rng(0).random((8, 16), np.float32)
OUTPUT_BYTES = 8 * 16 * 4


class FakeGpu:
    """A GPU on which a framework has 3000 bytes, of 4000 that it took from the driver."""

    name = "fake"


def test_the_context_on_a_gpu_is_not_of_the_allocator(monkeypatch):
    monkeypatch.setattr(hardware, "gpus_of_node", lambda: (FakeGpu(), FakeGpu()))
    monkeypatch.setattr(hardware, "visible_gpus", lambda gpus, _environment: gpus)
    monkeypatch.setattr(hardware, "memory_in_use", lambda _gpu, _pid: 9000)
    copied = []
    gauge = GpuMemory(1, lambda: 3000, lambda: 4000, lambda: None, copied.append)
    assert gauge.context_bytes() == 5000
    assert len(copied) == 1
    assert [memory_of_commands(device, (7,)) for device in (1, 2)] == [9000, 0]
    assert memory_of_commands(None, (os.getpid(),)) > 2**20


def test_an_allocator_tells_what_a_pass_keeps():
    allocated = [1000]

    def forward():
        allocated[0] += 4 * OUTPUT_BYTES
        return INPUTS

    gauge = GpuMemory(0, lambda: allocated[0], lambda: 0, lambda: None, lambda _: None)
    assert gauge.kept_by(forward, INPUTS) == 3 * OUTPUT_BYTES


def test_a_process_sees_the_peak_of_a_pass_that_has_ended():
    gauge = MemoryGauge()
    before = gauge.used()
    reset_peak_memory()
    np.ones(2**24)
    assert gauge.peak() - before > 2**26
    assert gauge.used() - before < 2**26
