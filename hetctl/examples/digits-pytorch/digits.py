"""Networks in PyTorch that classify handwritten digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn


def input_fn(path):
    """Return 1,437 training and 360 validation images of 8 x 8 pixels; scikit-learn includes them."""
    digits = load_digits()
    images = (digits.images / 16).astype("float32")[:, None]
    return (images[:1437], digits.target[:1437]), (images[1437:], digits.target[1437:])


def model_fn(config):
    """Build the network that a member's `config` describes."""
    width = config["filters"]
    convolution = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*convolution, nn.Flatten(), nn.Linear(16 * width, 10))
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=config["learning_rate"]),
        "loss": nn.CrossEntropyLoss(),
        "metrics": {"accuracy": accuracy},
    }


def accuracy(outputs, targets):
    """Return the share of samples whose greatest output is that of their class."""
    return (outputs.argmax(1) == targets).float().mean()
