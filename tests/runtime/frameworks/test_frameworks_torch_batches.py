"""Batches on the device: their values and types, whichever way they come there."""

import numpy as np
import pytest
import torch

from hetctl.runtime.frameworks.torch_batches import DeviceCopies, page_locked, present_device, tensor_of

pytestmark = pytest.mark.training
ROWS = np.arange(12).reshape(3, 4)
BATCHES = {
    "numbers": (ROWS * 0.5, ROWS[:, 0]),
    "small types": (ROWS.astype(np.float16), ROWS.astype(np.uint8)),
    "not contiguous": (ROWS.T * 0.5, ROWS[::2, ::3]),
    "empty": (ROWS[:0] * 0.5, ROWS[:0, 0]),
    "weights": (ROWS, ROWS[:, 0], np.ones(3, np.float32)),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_a_batch_has_its_values_on_the_device(batch):
    device = present_device()
    copies = DeviceCopies(device)
    given = [values.copy() for values in batch]
    uploaded = [copies(given) for _ in range(3)]
    if device.type == "cuda":
        # Its memory may be overwritten as soon as the call returns.
        for values in given:
            values[...] = 0
    for tensors in uploaded:
        for tensor, values in zip(tensors, batch, strict=True):
            assert_same(tensor, tensor_of(values, device))


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_the_copy_for_the_gpu_has_memory_of_its_own(batch):
    for values in batch:
        given, wanted = values.copy(), tensor_of(values, torch.device("cpu"))
        copy = page_locked(given, lock=torch.cuda.is_available())
        given[...] = 0
        assert_same(copy, wanted)
        assert copy.is_contiguous()


def assert_same(tensor, wanted):
    assert (tensor.dtype, tensor.device) == (wanted.dtype, wanted.device)
    assert torch.equal(tensor, wanted)
