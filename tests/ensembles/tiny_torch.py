"""The networks of `tiny`, in PyTorch."""

import os
import random
import time
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
from handwriting import failing, input_fn, note  # noqa: F401
from torch import nn


def no_input_fn(path):
    raise ValueError("the samples are not to be loaded")


class Uncut(nn.Module):
    """A network of one module, which cannot be cut."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


def model_fn(config):
    if config.get("broken"):
        raise ValueError("no such network")
    units = config.get("units", 32)
    layers = [nn.Flatten(), nn.Linear(64, units), nn.ReLU()]
    if config.get("dropout"):
        layers.append(nn.Dropout(config["dropout"]))
    if config.get("batch_norm"):
        layers.append(nn.BatchNorm1d(units))
    model = nn.Sequential(*layers, nn.Linear(units, 10))
    if config.get("uncut"):
        model = Uncut(model)
    momentum = partial(torch.optim.SGD, momentum=0.9)
    optimizers = {"sgd": torch.optim.SGD, "momentum": momentum, "adam": torch.optim.Adam}
    optimizer = optimizers[config.get("optimizer", "adam")](
        model.parameters(), lr=config.get("learning_rate", 0.01)
    )
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if config.get("decay") else None
    if config.get("plateau"):
        decay = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0, threshold=9)
    scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=2) if config.get("scaled") else None
    return {
        "model": model,
        "optimizer": optimizer,
        "loss": nn.CrossEntropyLoss(),
        "metrics": {"accuracy": accuracy},
        "scheduler": decay,
        "loss_scale": scaler,
    }


def fit_train_fn(data, model, optimizer, config):
    """A train_fn with the loop that everybody writes, which rests for `pause_s` after each step.

    After a step it leaves the file `began`, if there is such a key.
    """
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if "began" in config:
            Path(config["began"]).touch()
        time.sleep(config.get("pause_s", 0.0))
    return {"loss": float(np.mean(losses)) if losses else 0.0}


class MovingAverage:
    """Exponential moving average of a model's weights."""

    def __init__(self, model):
        self.weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model):
        for name, value in model.named_parameters():
            self.weights[name].lerp_(value.detach(), 0.1)

    def state_dict(self):
        return self.weights

    def load_state_dict(self, state):
        for name, value in state.items():
            self.weights[name].copy_(value)


def mixed_train_fn(data, model, optimizer, config, context):
    """A train_fn with mixed precision, gradients of three batches a step, and an average of the weights."""
    scaler, state = context.loss_scale, context.state
    average = state.setdefault("average", MovingAverage(model))
    losses = []
    for x, y in data:
        with torch.autocast(context.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss / 3).backward()
        if context.step % 3 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            average.update(model)
        losses.append(loss.item())
        state["seen"] = state.get("seen", np.zeros(2, int)) + np.array([1, data.samples])
    context.on_epoch_end(lambda: state.setdefault("ended", []).append([context.epoch, context.step]))
    return float(np.mean(losses)) if losses else 0.0


def noisy_train_fn(data, model, optimizer, config, context):
    """A train_fn with noise from all generators, of which each rank uses other numbers."""
    losses = []
    if context.step == 0:
        draws = [(random.random(), np.random.rand(), torch.rand(1)) for _ in range(context.rank)]
        assert len(draws) == context.rank
    for x, y in data:
        noise = random.random() + np.random.rand(*x.shape) + torch.randn_like(x).numpy()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x + torch.tensor(noise, dtype=x.dtype)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses)) if losses else 0.0


def paced_train_fn(data, model, optimizer, config):
    """A train_fn in which each rank rests as long for a sample as `seconds` says, and notes the samples."""
    import torch.distributed as dist

    rank, losses = dist.get_rank(), []
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        time.sleep(config["seconds"][rank] * len(x))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with Path(f"{config['seen']}-{rank}").open("a") as file:
            print(*(zlib.crc32(one.numpy().tobytes()) for one in x), file=file)
    return {"loss": float(np.mean(losses)) if losses else 0.0}


def typed_train_fn(data, model, optimizer, config):
    """A train_fn in which each rank rests as long for a sample as `seconds` says of its node."""
    losses, seconds = [], config["seconds"][os.environ["SLURMD_NODENAME"]]
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        time.sleep(seconds * len(x))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": float(np.mean(losses)) if losses else 0.0}


def hungry_train_fn(data, model, optimizer, config):
    """A train_fn for which batches of more than `most` samples are too large."""

    def small_enough():
        for x, y in data:
            if len(x) > config["most"]:
                torch.ones(2**50)
            yield x, y

    return fit_train_fn(small_enough(), model, optimizer, config)


def noted_train_fn(data, model, optimizer, config):
    """A train_fn after which each rank notes a checksum of its weights in the file `noted` with its GPU."""
    result = fit_train_fn(data, model, optimizer, config)
    momenta = (value for state in optimizer.state.values() for value in state.values())
    tensors = (*model.state_dict().values(), *momenta)
    note([tensor.numpy() for tensor in tensors if torch.is_tensor(tensor)], config)
    return result


def doomed_train_fn(data, model, optimizer, config):
    """A train_fn that rests for `pause_s` after each step, and in which a lone rank fails, the first time."""
    return fit_train_fn(failing(data, config["rank"], config), model, optimizer, config)


def fragile_train_fn(data, model, optimizer, config):
    """A train_fn in which one rank fails after some batches, the first time."""
    import torch.distributed as dist

    return fit_train_fn(failing(data, dist.get_rank(), config), model, optimizer, config)
