"""Learning rates of a PyTorch optimizer, scaled while it takes a step."""

from __future__ import annotations

from typing import Any

import torch


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
