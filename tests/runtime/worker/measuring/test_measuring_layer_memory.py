"""Memory of layers: what PyTorch saves, a GPU by substitutes, and the process."""

from __future__ import annotations

import numpy as np
import pytest
import ranks

from hetctl.runtime.worker.hardware import reset_peak_memory
from hetctl.runtime.worker.measuring import layer_memory
from hetctl.runtime.worker.measuring.layer_memory import GpuMemory, PoolMemory, ProcessMemory, saved_bytes

torch = pytest.importorskip("torch")
nn = torch.nn

INPUTS = np.random.default_rng(0).random((8, 16), np.float32)
OUTPUT_BYTES = 8 * 16 * 4


def saved_by(module):
    def forward():
        given = torch.as_tensor(INPUTS).requires_grad_()
        passes.append(module(given.clone()))
        return passes[-1].detach().numpy()

    passes = []
    return saved_bytes(torch, forward, INPUTS)


@pytest.mark.parametrize(
    ("module", "beside_outputs"),
    [
        (nn.Linear(16, 16), 0),
        (nn.Tanh(), 0),
        (nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), OUTPUT_BYTES),
    ],
)
def test_weights_inputs_and_outputs_are_told_from_the_rest(module, beside_outputs):
    assert saved_by(module) == OUTPUT_BYTES + beside_outputs


def test_masks_of_dropout_count():
    torch.manual_seed(0)
    assert saved_by(nn.Dropout(0.5)) > OUTPUT_BYTES


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
    gauge = ProcessMemory(None)
    before = gauge.used()
    reset_peak_memory()
    np.ones(2**24)
    assert gauge.peak() - before > 2**26
    assert gauge.used() - before < 2**26


@pytest.mark.training
def test_a_pool_does_not_hide_what_a_pass_needs():
    tf = pytest.importorskip("tensorflow")

    def run():
        return tf.reduce_sum(tf.random.uniform((2**24,))).numpy()

    gauge = PoolMemory(tf)
    run()
    before = gauge.used()
    gauge.reset_peak()
    run()
    assert gauge.peak() - before >= 2**26
    assert gauge.used() - before < 2**26
    assert layer_memory._has_pool(tf)


SIZE = 2**20
"""Numbers of a tensor."""


def write_kept(path):
    """Measure a pass in a process of its own: in this one, tensors of other tests come and go."""
    import tensorflow as tf

    inputs, kept = np.ones(SIZE, np.float32), []

    def forward():
        kept.append(tf.convert_to_tensor(inputs + 1))
        kept.append(kept[0] * 2)
        kept.append(kept[1] * 2)
        return kept[2].numpy()

    path.write_text(str(PoolMemory(tf).kept_by(forward, inputs)))


@pytest.mark.training
def test_a_pool_tells_what_a_pass_keeps(tmp_path):
    pytest.importorskip("tensorflow")
    process = ranks.fork(write_kept, tmp_path / "kept", log=tmp_path / "log")
    process.join(ranks.PATIENCE_S)
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    # Tensors may be in holes of the pool that are up to twice as large.
    assert 2 * 4 * SIZE <= int((tmp_path / "kept").read_text()) <= 5 * 4 * SIZE
