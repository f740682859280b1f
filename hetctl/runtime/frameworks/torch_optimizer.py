"""Optimizers of PyTorch: their learning rates, and steps over several batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch.autograd import Variable

from hetctl.model.errors import BadInputError


class RateFactor:
    """Factor of an optimizer's learning rates; at all other times its groups hold the rates for one GPU.

    Attributes
    ----------
    factor : float
        Factor of all later steps, also if a scheduler sets the rates.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = 1.0
        self._rates: list[Any] = []
        optimizer.register_step_pre_hook(self._scale)
        optimizer.register_step_post_hook(self._unscale)

    def _scale(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _unscale(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Restore the rates from which the scheduler computes the next ones."""
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def at_end_of_backward(parameters: Iterable[torch.Tensor], call: Callable[[], None]) -> None:
    """Have a function called once at the end of every backward pass that gives a parameter a gradient."""
    queued = False

    def end() -> None:
        nonlocal queued
        queued = False
        call()

    def after_gradient(_parameter: torch.Tensor) -> None:
        nonlocal queued
        if not queued:
            queued = True
            # The engine calls it once, at the end of this backward pass; DistributedDataParallel
            # relies on it, too.
            Variable._execution_engine.queue_callback(end)

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(after_gradient)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Accumulation:
    """Weighted sum of the gradients of the batches of one step; the optimizer steps with the last of them.

    At the end of the last backward pass of a step the parameters have the gradients of the whole step, of
    all ranks. So clipping between that pass and the step is that of the whole step. After the other batches
    ``optimizer.step()`` does nothing.

    Parameters
    ----------
    averaged : bool
        True if an average of the ranks' gradients calls `finish`; False: there is one rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, averaged: bool) -> None:
        self._optimizer = optimizer
        self._averaged = averaged
        self._weight = 1.0
        self._ends_step = True
        self._taken = False
        self._totals: dict[torch.Tensor, torch.Tensor] = {}
        at_end_of_backward(parameters_of(optimizer), self._after_backward)
        # A pre-hook cannot prevent a step. Schedulers mark the method, and `wraps` keeps their mark.
        optimizer.step = self._at_the_end(optimizer.step)

    def begin(self) -> None:
        """Begin a step: drop the gradients of one that was not finished."""
        self._totals.clear()

    def expect(self, weight: float, *, ends_step: bool) -> None:
        """Note the next batch: its share in the samples of the step, and whether it is this rank's last."""
        self._weight, self._ends_step, self._taken = weight, ends_step, False

    def finish(self, parameter: torch.Tensor) -> None:
        """Set a parameter's gradient to that of the whole step; call it once after the last batch."""
        self._add(parameter)
        parameter.grad = self._totals.pop(parameter, None)

    def _add(self, parameter: torch.Tensor) -> None:
        """Add the gradient of a batch to that of the step."""
        # A rank without samples runs its example batch only to take part: its gradients must not count.
        if parameter.grad is not None and self._weight:
            with torch.no_grad():
                part, total = parameter.grad * self._weight, self._totals.get(parameter)
                self._totals[parameter] = part if total is None else total + part

    def _after_backward(self) -> None:
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
            # Gradients that were not computed by a backward pass.
            if not self._taken:
                self._take()
            if self._ends_step:
                step()
            else:
                self._optimizer.zero_grad()
            return loss

        return take
