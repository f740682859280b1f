"""What layers save in PyTorch, and the clock of what a GPU computes, on a model of its queue."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from hetctl.runtime.frameworks.torch_measuring import ComputeClock, saved_bytes

pytestmark = pytest.mark.training
INPUTS = np.random.default_rng(0).random((8, 16), np.float32)
OUTPUT_BYTES = 8 * 16 * 4


def saved_by(module):
    def forward():
        given = torch.as_tensor(INPUTS).requires_grad_()
        passes.append(module(given.clone()))
        return passes[-1].detach().numpy()

    passes = []
    return saved_bytes(forward, INPUTS)


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


HZ = 2e9
LAUNCH_S = 0.00001


class Gpu:
    """A GPU that begins what is in its queue as soon as it can, and the host that fills it."""

    def __init__(self, monkeypatch):
        self.host_s = self.free_s = 0.0
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(self))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(cycles / HZ), raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        self.clock = ComputeClock(lambda: self.host_s)

    def launch(self, kernel_s, launch_s=LAUNCH_S):
        self.host_s += launch_s
        self.free_s = max(self.free_s, self.host_s) + kernel_s

    def wait(self):
        self.host_s = max(self.host_s, self.free_s)


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at_s = max(self.gpu.free_s, self.gpu.host_s)

    def elapsed_time(self, later):
        return 1000 * (later.at_s - self.at_s)


def timed(gpu, kernels, launch_s):
    with gpu.clock.running():
        for kernel_s in kernels:
            gpu.launch(kernel_s, launch_s)
    return gpu.clock.taken()


@pytest.mark.parametrize("launch_s", [0.00001, 0.0005, 0.002])
def test_kernels_are_timed_without_the_wait_for_their_launches(monkeypatch, launch_s):
    gpu = Gpu(monkeypatch)
    kernels = [0.0001] * 10
    times = [timed(gpu, kernels, launch_s) for _ in range(3)]
    # Two passes are enough to know how long the launches take: those before measurements.
    assert times[-1].compute_s == pytest.approx(sum(kernels))
    assert times[-1].launch_s == pytest.approx(10 * launch_s)


def test_the_gpu_spins_little_longer_than_the_launches(monkeypatch):
    gpu = Gpu(monkeypatch)
    timed(gpu, [0.0001], 0.08)
    ends = []
    for _ in range(3):
        timed(gpu, [0.0001] * 2, 0.0005)
        ends.append(gpu.host_s)
    # The first one spins as long as the slow launches before it would have needed, within the limit.
    assert all(second - first < 0.0035 for first, second in pairwise(ends))
    assert ends[0] < 0.08 + 0.11 + 0.01


def test_all_spans_since_the_last_call_are_added(monkeypatch):
    gpu = Gpu(monkeypatch)
    timed(gpu, [0.001], LAUNCH_S)
    for _ in range(2):
        with gpu.clock.running():
            gpu.launch(0.001)
        gpu.launch(0.5)
    assert gpu.clock.taken().compute_s == pytest.approx(0.002)
    assert gpu.clock.taken().compute_s == 0
