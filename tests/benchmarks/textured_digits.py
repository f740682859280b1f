"""Digits on textured backgrounds, 32 x 32 pixels in colour, and two networks for them, in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn

Images = tuple[NDArray[np.float32], NDArray[np.int64]]
PIXELS, DIGIT, CELLS, SHIFT = 32, 24, 8, 2
"""Side of an image and of a digit on it, cells of its background's texture on a side, and most pixels off."""
TEXTURE, CONTRAST, NOISE = 0.5, 2.5, 0.4
TRAINING, VALIDATION, HELD_OUT = 2048, 1024, 400
"""Numbers of images, and of handwritten digits that only validation images show."""


def input_fn(_data: object) -> tuple[Images, Images]:
    """Return training and validation images."""
    digits, labels = load_digits(return_X_y=True)
    digits = digits.reshape(-1, 8, 8).astype(np.float32) / 16
    order = np.random.default_rng(0).permutation(len(digits))
    kept, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return (
        _images(digits[kept], labels[kept], TRAINING, seed=1),
        _images(digits[held_out], labels[held_out], VALIDATION, seed=2),
    )


def _images(digits: NDArray[np.float32], labels: NDArray[np.int64], count: int, seed: int) -> Images:
    """Put digits at random places on random textures, in lighter colours, under noise."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(digits), count)
    coarse = rng.normal(0, TEXTURE, (count, 3, CELLS, CELLS)).astype(np.float32)
    images = coarse.repeat(PIXELS // CELLS, 2).repeat(PIXELS // CELLS, 3)
    large = digits[chosen].repeat(DIGIT // 8, 1).repeat(DIGIT // 8, 2)
    colours = rng.uniform(CONTRAST / 2, CONTRAST, (count, 3, 1, 1))
    places = (PIXELS - DIGIT) // 2 + rng.integers(-SHIFT, SHIFT + 1, (count, 2))
    for image, digit, colour, (down, right) in zip(images, large, colours, places, strict=True):
        image[:, down : down + DIGIT, right : right + DIGIT] += digit * colour
    images += rng.normal(0, NOISE, images.shape)
    return images.astype(np.float32), labels[chosen].astype(np.int64)


class Block(nn.Module):
    """Two convolutions with a skip, which halve the sides of the image."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(before, width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.skip = nn.Conv2d(before, width, 1, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x) + self.skip(x))


def vgg() -> nn.Sequential:
    """Return four convolutions with batch normalisation, pooling between them, and two linear layers."""
    found: list[nn.Module] = []
    for before, width, pools in ((3, 8, True), (8, 16, False), (16, 16, True), (16, 32, True)):
        found += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        found += [nn.MaxPool2d(2)] if pools else []
    return nn.Sequential(*found, nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10))


def resnet() -> nn.Sequential:
    """Return three residual blocks with batch normalisation behind a convolution."""
    stem = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    blocks = (Block(8, 8), Block(8, 16), Block(16, 32))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


NETWORKS = {"vgg": vgg, "resnet": resnet}


def model_fn(config: Mapping[str, Any]) -> dict[str, Any]:
    """Build the network of a config; the rate falls to a tenth before the last epochs."""
    model = NETWORKS[config["network"]]()
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    optimizer = torch.optim.Adam(model.parameters(), config["learning_rate"], config["betas"])
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, config["falls_after"], 0.1),
        "loss": nn.CrossEntropyLoss(),
        "metrics": {"accuracy": accuracy},
    }


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float().mean()
