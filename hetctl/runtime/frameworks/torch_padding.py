"""Last batches of an epoch in PyTorch: padding for compiled modules, single samples for others.

A compiled module is traced again for each size of its batches: all its batches get one size, and the padding
is ignored. Modules that are not compiled get batches without padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm


def is_compiled(model: torch.nn.Module) -> bool:
    """Return true if ``torch.compile`` made the module, or compiled it or a part of it in place."""
    return any(
        "_orig_mod" in part._modules or part._compiled_call_impl is not None for part in model.modules()
    )


def ignore_padding(model: torch.nn.Module, is_sample: torch.Tensor) -> None:
    """Make batch normalisation compute its statistics from samples alone.

    Parameters
    ----------
    is_sample : torch.Tensor
        Shape (at least the rows of a batch,): 1 for each row of a batch that is a sample, 0 for padding; read
        at every step.
    """
    for part in model.modules():
        if isinstance(part, _BatchNorm) and not isinstance(part, torch.nn.SyncBatchNorm):
            # Another class rather than hooks, which would split the graph of a compiled module.
            part.__class__ = _masked(type(part))  # type: ignore[arg-type]
            part.is_sample = is_sample


def accept_lone_samples(model: torch.nn.Module) -> None:
    """Make batch norm use its running statistics for a single sample, which it would reject in training.

    For any batch size, the last batch of an epoch may leave a rank with one sample. The module must not be
    compiled: the hooks would split its graph.
    """
    lone: set[torch.nn.Module] = set()

    def before(norm: torch.nn.Module, inputs: Any) -> None:
        values = inputs[0]
        if norm.training and values.numel() == values.shape[1]:
            lone.add(norm)
            norm.eval()

    def after(norm: torch.nn.Module, *_: Any) -> None:
        if norm in lone:
            lone.remove(norm)
            norm.train()

    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm):
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)


def first_rows(outputs: Any, rows: int) -> Any:
    """Return the first rows of each tensor of a network's outputs."""
    if isinstance(outputs, torch.Tensor):
        return outputs[:rows]
    if isinstance(outputs, Mapping):
        return {name: first_rows(value, rows) for name, value in outputs.items()}
    return type(outputs)(first_rows(value, rows) for value in outputs)


@lru_cache(maxsize=16)
def _masked(norm: type[Any]) -> type[Any]:
    """Return the class of a batch normalisation whose statistics use `is_sample`."""

    class Masked(norm):  # type: ignore[misc]
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            rows = len(inputs)
            if not self.training or rows > len(self.is_sample):
                return self._forward_unpadded(inputs)
            self._check_input_dim(inputs)
            mean, variance = _moments(self, inputs, self.is_sample[:rows])
            scale = torch.rsqrt(variance + self.eps)
            if self.affine:
                scale, shift = scale * self.weight, self.bias
            else:
                shift = torch.zeros_like(mean)
            return inputs * _wide(scale, inputs) + _wide(shift - mean * scale, inputs)

        def _forward_unpadded(self, inputs: torch.Tensor) -> torch.Tensor:
            is_lone = self.training and inputs.numel() == inputs.shape[1] and self.running_mean is not None
            if not is_lone:
                return super().forward(inputs)
            statistics = self.running_mean, self.running_var, self.weight, self.bias
            return torch.nn.functional.batch_norm(inputs, *statistics, training=False, eps=self.eps)

    Masked.__name__ = Masked.__qualname__ = norm.__name__
    return Masked


def _moments(norm: Any, inputs: torch.Tensor, is_sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the biased variance of each channel over samples; update the running ones.

    A single value per channel has no variance: it is normalised by the running statistics.
    """
    axes = [axis for axis in range(inputs.dim()) if axis != 1]
    weights = is_sample.to(inputs.dtype).view(-1, *[1] * (inputs.dim() - 1))
    count = is_sample.sum() * inputs[0, 0].numel()
    mean = (inputs * weights).sum(axes) / count
    centred = (inputs - _wide(mean, inputs)) * weights
    variance = centred.square().sum(axes) / count
    if norm.running_mean is None:
        return mean, variance
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        share = 1.0 / norm.num_batches_tracked if norm.momentum is None else norm.momentum
        # PyTorch's running variance is the unbiased one, though a batch is normalised by the biased one.
        unbiased = variance * count / (count - 1).clamp(min=1)
        for running, current in ((norm.running_mean, mean), (norm.running_var, unbiased)):
            updated = running + share * (current.to(running.dtype) - running)
            running.copy_(torch.where(count > 1, updated, running))
    # torch.where() rather than a branch on the value of a tensor, which would
    # split the graph of a compiled module.
    several = count > 1
    return torch.where(several, mean, norm.running_mean), torch.where(several, variance, norm.running_var)


def _wide(values: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return a value per channel in a shape that broadcasts with `inputs`."""
    return values.view(1, -1, *[1] * (inputs.dim() - 2))
