"""Results of ``model_fn`` in PyTorch: their state as arrays, and optimizer steps over several batches.

Each tensor of the state lies under its path, as in `packed_state`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from functools import partial, wraps
from typing import Any

import numpy.typing as npt
import torch
from torch.autograd import Variable
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from hetctl.model.errors import BadInputError
from hetctl.model.values import dataclass
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.frameworks import packed_state
from hetctl.runtime.frameworks.torch_batches import tensors_of

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Types, by size in bytes, for the bits of numbers that NumPy lacks, such as bfloat16."""


def without_functions(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without functions, which ``model_fn`` creates again."""
    return {name: value for name, value in state.items() if not callable(value)}


def generators() -> dict[str, torch.Tensor]:
    """Return the states of the random generators, by device."""
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def set_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Set the generators to states that `generators` returned."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _dissolved(value: Any) -> tuple[npt.NDArray[Any], str] | None:
    if not isinstance(value, torch.Tensor):
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    try:
        return value.numpy(force=True), dtype
    except TypeError:
        return value.view(BITS[value.element_size()]).numpy(force=True), dtype


def _formed(array: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    return torch.tensor(array).view(getattr(torch, dtype))


pack = partial(packed_state.pack, dissolve=_dissolved)
unpack = partial(packed_state.unpack, form=_formed)
"""Functions of `packed_state` for states with tensors."""


class TorchRate:
    """Learning rates of an optimizer, a `LearningRate`; outside of steps its groups hold the unscaled rates.

    Attributes
    ----------
    factor : float
        Factor of all later steps, even if a scheduler sets the rates.
    """

    def __init__(self, parts: Parts) -> None:
        self.factor = 1.0
        self._parts = parts
        self._rates: list[Any] = []
        parts.optimizer.register_step_pre_hook(self._scale)
        parts.optimizer.register_step_post_hook(self._unscale)

    def scale(self, factor: float) -> None:
        """Scale the rates of all later steps."""
        self.factor *= factor

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the options of the optimizer's groups, and the scheduler's base rates, through a `restore`."""
        groups, scheduler = self._parts.optimizer.param_groups, self._parts.scheduler
        kept = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        rates = getattr(scheduler, "base_lrs", None)
        yield
        for group, own in zip(self._parts.optimizer.param_groups, kept, strict=True):
            group.update(own)
        if scheduler is not None and rates is not None:
            scheduler.base_lrs = rates
        self.factor = 1.0

    def _scale(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _unscale(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Restore the rates from which the scheduler computes the next ones."""
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Accumulation:
    """Weighted sum of the gradients of a step's batches; the optimizer steps after the last batch.

    After the last backward pass of a step the parameters have the gradients of the whole step, of all ranks,
    so clipping sees these. After the other batches ``optimizer.step()`` does nothing.

    Parameters
    ----------
    averaged : bool
        True if `Averaging` calls `finish`; False for one rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, averaged: bool) -> None:
        self._optimizer = optimizer
        self._averaged = averaged
        self._weight = 1.0
        self._ends_step = True
        self._taken = False
        self._totals: dict[torch.Tensor, torch.Tensor] = {}
        self._queued = False
        for parameter in parameters_of(optimizer):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._after_gradient)
        # A pre-hook cannot prevent a step. `wraps` keeps the mark that schedulers put on the method.
        optimizer.step = self._at_the_end(optimizer.step)

    def begin(self) -> None:
        """Begin a step; drop the gradients of an unfinished one."""
        self._totals.clear()

    def expect(self, weight: float, *, ends_step: bool) -> None:
        """Note the next batch's share in the samples of the step, and whether it is this rank's last."""
        self._weight, self._ends_step, self._taken = weight, ends_step, False

    def finish(self, parameter: torch.Tensor) -> None:
        """Set a parameter's gradient to the whole step's; call it once after the last batch."""
        self._add(parameter)
        parameter.grad = self._totals.pop(parameter, None)

    def _add(self, parameter: torch.Tensor) -> None:
        """Add the gradient of a batch to the step's."""
        # A rank without samples runs an example only to take part: its gradients must not count.
        if parameter.grad is not None and self._weight:
            with torch.no_grad():
                part, total = parameter.grad * self._weight, self._totals.get(parameter)
                self._totals[parameter] = part if total is None else total + part

    def _after_gradient(self, _parameter: torch.Tensor) -> None:
        if not self._queued:
            self._queued = True
            # The engine calls it once, at the end of this pass; DistributedDataParallel relies on it, too.
            Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._queued = False
        if self._taken:
            raise BadInputError(
                "train_fn made two backward passes for one batch of a member with global_batch_size",
                "add up its losses before a single loss.backward(), or use batch_size",
            )
        self._take()

    def _take(self) -> None:
        """Take the gradients of a batch."""
        self._taken = True
        if self._ends_step and self._averaged:
            return
        for parameter in parameters_of(self._optimizer):
            (self.finish if self._ends_step else self._add)(parameter)

    def _at_the_end(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the optimizer's step, taken after the last batch only."""

        @wraps(step)
        def take(closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            # No backward pass computed these gradients.
            if not self._taken:
                self._take()
            if self._ends_step:
                step()
            else:
                self._optimizer.zero_grad()
            return loss

        return take


Score = Callable[[Any, Any], Any]
"""A loss or a metric: function of outputs and targets that returns the mean over samples."""


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
        """True if the scheduler's ``step`` takes the value of a metric, as ReduceLROnPlateau's does."""
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
    """Move the parts to the device, and create lazy parameters."""
    for part in (parts.model, parts.loss):
        if isinstance(part, torch.nn.Module):
            part.to(device)
    if any(is_lazy(parameter) for parameter in parts.model.parameters()):
        with torch.no_grad():
            # In eval mode: this sample must not enter the running statistics of batch norm.
            parts.model.eval()
            parts.model(tensors_of(sample[0][:1], device))


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
