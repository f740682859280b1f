"""The network of the paced workers in PyTorch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paced_digits import UNITS, input_fn, sleep_as
from torch import nn

Config = dict[str, Any]


def accuracy(outputs: Any, targets: Any) -> Any:
    """Return the share of samples whose largest output is right."""
    return (outputs.argmax(1) == targets).float().mean()


def model_fn(config: Config) -> dict[str, Any]:
    """Return a perceptron with the initial weights of the config's seed."""
    torch.manual_seed(config["seed"])
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, UNITS), nn.ReLU(), nn.Linear(UNITS, 10))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), config["learning_rate"], config["momentum"]),
        "loss": nn.CrossEntropyLoss(),
        "metrics": {"accuracy": accuracy},
    }


def train_fn(data: Iterable[Any], model: Any, optimizer: Any, config: Config) -> dict[str, float]:
    """Train, paced."""
    rank, losses = torch.distributed.get_rank(), []
    for x, y in data:
        optimizer.zero_grad()
        loss = paced_loss(model, x, y, rank, config["pace"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": float(np.mean(losses)) if losses else 0.0}


def logged_train_fn(data: Iterable[Any], model: Any, optimizer: Any, config: Config) -> dict[str, float]:
    """Train, paced; rank 0 notes the time and the validation loss after each step."""
    if torch.distributed.get_rank():
        return train_fn(data, model, optimizer, config)
    log = Log(config["out"])
    hook = optimizer.register_step_post_hook(lambda *_: log.note(model))
    result = train_fn(data, model, optimizer, config)
    hook.remove()
    log.write()
    return result


def paced_loss(model: Any, x: Any, y: Any, worker: int, pace: float = 1.0) -> Any:
    """Return the loss of a batch, as late as the worker's pace says."""
    began = time.monotonic()
    loss = nn.functional.cross_entropy(model(x), y)
    sleep_as(worker, len(x), began, pace)
    return loss


class Log:
    """Times and validation losses after updates, appended to a file as a line of JSON."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        _validation()
        self._began = time.time()
        self._points: list[tuple[float, float]] = []

    def note(self, model: Any) -> float:
        """Note an update; return the validation loss."""
        x, y = _validation()
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(x), y))
        self._points.append((time.time(), loss))
        return loss

    def write(self) -> None:
        """Append the line."""
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps((self._began, self._points)), file=file)


@cache
def _validation() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = input_fn(None)[1]
    return torch.as_tensor(x), torch.as_tensor(y)
