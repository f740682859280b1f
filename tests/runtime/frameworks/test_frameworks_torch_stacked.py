"""Layers and losses of several networks at once: as each network's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetctl.runtime.frameworks.torch_stacked import StackedModule, losses_of

pytestmark = pytest.mark.training

NETWORKS, BATCH = 3, 5
IMAGES, ROWS, WORDS = (2, 8, 8), (6,), (4, 6)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        return x + self.inner(x)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    layer = nn.Linear(6, 6)
    layer.register_forward_hook(lambda _layer, _inputs, outputs: outputs + 1)
    return layer


SEQUENCES = {
    "convolutions": (
        lambda: [
            *(nn.Conv2d(2, 4, 3, padding="same", groups=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 3, 3, stride=2, bias=False), nn.GELU(), nn.AvgPool2d(1), nn.Flatten()),
            *(nn.Linear(3, 2), nn.Tanh()),
        ],
        IMAGES,
    ),
    "words": (lambda: [nn.Linear(6, 3, bias=False), nn.Sequential(nn.SiLU(), nn.Linear(3, 2))], WORDS),
    "volumes": (lambda: [nn.Conv3d(2, 2, 2), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(2, 2)], (2, 3, 3, 3)),
    "one dimension": (lambda: [nn.Conv1d(4, 2, 3, dilation=2), nn.MaxPool1d(2)], WORDS),
    "without a form": (lambda: [Residual(), nn.LayerNorm(6), nn.ReLU(), Doubled(6, 6), hooked()], ROWS),
    "circular": (lambda: [nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular")], WORDS),
    "flattened in part": (lambda: [nn.Flatten(2), nn.Linear(64, 2)], IMAGES),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_outputs_and_gradients_are_those_of_each_network(name):
    torch.manual_seed(1)
    layers, shape = SEQUENCES[name]
    modules = [nn.Sequential(*layers()).double() for _ in range(NETWORKS)]
    own = [[*module.parameters()] for module in modules]
    x = torch.randn(NETWORKS, BATCH, *shape, dtype=torch.float64)
    stacked = [torch.stack(each).detach().requires_grad_() for each in zip(*own, strict=True)]
    outputs = StackedModule(modules[0], own[0])(stacked, x)
    expected = torch.stack([module(each) for module, each in zip(modules, x, strict=True)])
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(outputs.square().sum(), stacked)
    flat = iter(torch.autograd.grad(expected.square().sum(), [one for each in own for one in each]))
    for number, parameters in enumerate(own):
        for gradient, _ in zip(gradients, parameters, strict=True):
            torch.testing.assert_close(gradient[number], next(flat), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        nn.functional.cross_entropy,
        nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)),
        nn.CrossEntropyLoss(reduction="sum"),
        lambda outputs, y: (outputs.argmax(1) == y).double().mean(),
    ],
)
@pytest.mark.parametrize("positions", [(), (4,)])
def test_losses_are_those_of_each_network(loss, positions):
    torch.manual_seed(1)
    outputs = torch.randn(NETWORKS, BATCH, 3, *positions, dtype=torch.float64)
    y = torch.randint(3, (NETWORKS, BATCH, *positions))
    expected = torch.stack([loss(*each) for each in zip(outputs, y, strict=True)])
    torch.testing.assert_close(losses_of(loss, outputs, y), expected, rtol=1e-12, atol=1e-12)


def test_probabilities_as_targets():
    outputs, y = torch.randn(2, 3, 4), torch.randn(2, 3, 4).softmax(2)
    expected = [nn.functional.cross_entropy(*each) for each in zip(outputs, y, strict=True)]
    torch.testing.assert_close(losses_of(nn.CrossEntropyLoss(), outputs, y), torch.stack(expected))
