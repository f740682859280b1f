"""Memory of layers: what PyTorch saves for the backward pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hetctl.runtime.frameworks.torch_memory import saved_bytes

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
