"""Chains in PyTorch for pipelines, with handwritten digits as numbers of 64 bits."""

import time

import torch
from handwriting import digits
from torch import nn


class Pause(nn.Module):
    """A layer that takes time, and makes numbers of 64 bits."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        if self.training and self.seconds:
            time.sleep(self.seconds)
        return x.double()


def input_fn(_data):
    x, y = digits()
    x = x.astype("float64").reshape(len(x), 64)
    return (x[:640], y[:640]), (x[640:800], y[640:800])


def model_fn(config):
    def linear(inputs, outputs):
        return nn.Linear(inputs, outputs, dtype=torch.float64)

    pause = Pause(config.get("pause_s", 0.0))
    layers = [pause, linear(64, 24), nn.Tanh(), linear(24, 16), nn.Tanh(), linear(16, 10)]
    model = nn.Sequential(*layers)
    if config["optimizer"] == "adam":
        optimizer = torch.optim.Adam(model.parameters(), config["learning_rate"])
    else:
        optimizer = torch.optim.SGD(model.parameters(), config["learning_rate"], momentum=0.5)
    parts = {"model": model, "optimizer": optimizer, "loss": nn.CrossEntropyLoss()}
    if "decay" in config:
        parts["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, config["decay"])
    return parts
