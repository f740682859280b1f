"""Results of ``model_fn`` in PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from hetctl.model.errors import BadInputError
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.frameworks.torch_batches import tensors_of

Score = Callable[[Any, Any], Any]
"""A loss or a metric: function of outputs and targets that returns its mean over them."""


@dataclass(frozen=True)
class Parts:
    """Parts of a network that ``model_fn`` returns as a mapping."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Score
    metrics: Mapping[str, Score] = field(default_factory=dict)
    scheduler: LRScheduler | None = None
    loss_scale: torch.amp.GradScaler | None = None

    @property
    def waits_for_metric(self) -> bool:
        """True if the scheduler's ``step`` takes the value of a metric, as that of ReduceLROnPlateau does."""
        step = getattr(self.scheduler, "step", None)
        return step is not None and "metrics" in inspect.signature(step).parameters


KINDS: dict[str, tuple[Any, str]] = {
    "model": (torch.nn.Module, "a torch.nn.Module"),
    "optimizer": (torch.optim.Optimizer, "a torch.optim.Optimizer"),
    "loss": (Callable, "a function of outputs and targets"),
    "metrics": (Mapping, "a mapping of names to functions of outputs and targets"),
    "scheduler": (LRScheduler, "a torch.optim.lr_scheduler.LRScheduler"),
    "loss_scale": (torch.amp.GradScaler, "a torch.amp.GradScaler"),
}
REQUIRED = ("model", "optimizer", "loss")


def parts_of(returned: Any, name: str) -> Parts:
    """Return the checked result of ``model_fn`` for the member of that name.

    Raises
    ------
    BadInputError
        If the result is not a mapping of `Parts`.
    """
    if not isinstance(returned, Mapping):
        raise _not_parts(name, f"{type(returned).__name__} instead of a mapping")
    given = {key: value for key, value in returned.items() if value is not None}
    if problem := next(_problems(given), None):
        raise _not_parts(name, problem)
    return Parts(**given)


def make_parameters(parts: Parts, sample: Samples, device: torch.device) -> None:
    """Move the parts to the device, and create the parameters that depend on the shapes of inputs."""
    for part in (parts.model, parts.loss):
        if isinstance(part, torch.nn.Module):
            part.to(device)
    if any(is_lazy(parameter) for parameter in parts.model.parameters()):
        with torch.no_grad():
            # In eval mode, or this sample would enter the running statistics of batch norm.
            parts.model.eval()(tensors_of(sample[0][:1], device))


@contextmanager
def options_kept(parts: Parts) -> Iterator[None]:
    """Keep the options of the optimizer's groups and the scheduler's base rates over a `restore`."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in parts.optimizer.param_groups
    ]
    rates = getattr(parts.scheduler, "base_lrs", None)
    yield
    for group, own in zip(parts.optimizer.param_groups, groups, strict=True):
        group.update(own)
    if parts.scheduler is not None and rates is not None:
        parts.scheduler.base_lrs = rates


def _problems(given: Mapping[Any, Any]) -> Iterator[str]:
    yield from (f"the unknown key {key}" for key in given if key not in KINDS)
    yield from (f"no {key}" for key in REQUIRED if key not in given)
    for key, value in given.items():
        kind, words = KINDS[key]
        if not isinstance(value, kind):
            yield f"{type(value).__name__} as {key} instead of {words}"
    metrics = given.get("metrics", {})
    yield from (f"no function as metric {name}" for name in metrics if not callable(metrics[name]))
    if "loss" in metrics:
        yield "a metric named loss, which is the name of the loss itself"
    scheduler = given.get("scheduler")
    if scheduler is not None and getattr(scheduler, "optimizer", None) is not given["optimizer"]:
        yield "a scheduler of another optimizer"


def _not_parts(name: str, problem: str) -> BadInputError:
    return BadInputError(
        f"model_fn returned {problem} for {name}",
        'return {"model": module, "optimizer": optimizer, "loss": function}, and optionally '
        '"metrics": {name: function}, "scheduler": scheduler and "loss_scale": scaler',
    )
