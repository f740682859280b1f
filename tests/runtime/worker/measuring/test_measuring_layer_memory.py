"""Memory of layers: a GPU by substitutes, and the process."""

from __future__ import annotations

import numpy as np

from hetctl.runtime.worker.hardware import reset_peak_memory
from hetctl.runtime.worker.measuring import layer_memory
from hetctl.runtime.worker.measuring.layer_memory import GpuMemory, MemoryGauge

INPUTS = np.random.default_rng(0).random((8, 16), np.float32)
OUTPUT_BYTES = 8 * 16 * 4


class FakeGpu:
    """A GPU on which a framework has 3000 bytes, of 4000 that it took from the driver."""

    name = "fake"


def test_the_context_on_a_gpu_is_not_of_the_allocator(monkeypatch):
    monkeypatch.setattr(layer_memory, "gpus_of_node", lambda: (FakeGpu(), FakeGpu()))
    monkeypatch.setattr(layer_memory, "visible_gpus", lambda gpus, _environment: gpus)
    monkeypatch.setattr(layer_memory, "memory_in_use", lambda _gpu, _pid: 9000)
    copied = []
    gauge = GpuMemory(1, lambda: 3000, lambda: 4000, lambda: None, copied.append)
    assert gauge.context_bytes() == 5000
    assert len(copied) == 1


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
