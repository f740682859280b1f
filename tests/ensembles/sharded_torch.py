"""A network of blocks in a list with a tied weight, for training in parts of it."""

import time

import torch
from tiny_torch import accuracy, input_fn
from torch import nn


def short_input_fn(config):
    """Give 10 batches of at most 33 samples, or 7 of 46, of which the last is not full."""
    (x, y), validation = input_fn(config)
    return (x[:310], y[:310]), validation


class Block(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.up, self.down = nn.Linear(units, 3 * units), nn.Linear(3 * units, units)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """Pixels go in and out by the same weight, which belongs to two modules."""

    def __init__(self, units, batch_norm):
        super().__init__()
        self.into, self.back = nn.Linear(64, units, bias=False), nn.Linear(64, units, bias=False)
        self.back.weight = self.into.weight
        self.body = nn.ModuleList([Block(units), nn.Sequential(Block(units), Block(units))])
        self.norm = nn.BatchNorm1d(units) if batch_norm else nn.LayerNorm(units)
        self.bias = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.into(x.flatten(1).double())
        for block in self.body:
            x = block(x)
        return self.head(torch.tanh(self.norm(x) @ self.back.weight)) + self.bias.sum()


OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.003),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.02, initial_accumulator_value=0.1),
}


def model_fn(config):
    model = Blocks(config.get("units", 17), config.get("batch_norm", False)).double()
    optimizer = OPTIMIZERS[config.get("optimizer", "adam")](model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = config.get("learning_rate", group["lr"])
    parts = {"model": model, "optimizer": optimizer, "loss": nn.CrossEntropyLoss()}
    parts["metrics"] = {"accuracy": accuracy}
    parts["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    match config.get("wrong"):
        case "compiled":
            parts["model"] = torch.compile(model)
        case "scale":
            parts["loss_scale"] = torch.amp.GradScaler("cpu")
        case "others":
            optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
        case "scalar":
            model.factor = nn.Parameter(torch.tensor(1.0))
    return parts


def summing_train_fn(data, model, optimizer, config, context):
    """A train_fn that steps after three batches, clips, and keeps a number."""
    total, samples = 0.0, 0
    for x, y in data:
        loss = nn.functional.cross_entropy(model(x), y)
        (loss / 3).backward()
        if context.step % 3 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        total, samples = total + loss.item() * data.counted, samples + data.counted
        context.state["batches"] = context.state.get("batches", 0) + 1
    return total / samples if samples else 0.0


def resting_train_fn(data, model, optimizer, config):
    """A train_fn that rests after each step."""
    total, samples = 0.0, 0
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total, samples = total + loss.item() * data.counted, samples + data.counted
        time.sleep(config["rest_s"])
    return total / samples if samples else 0.0
