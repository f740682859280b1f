"""Batches in PyTorch: their tensors, and an epoch's last batches, padded or with a single sample.

A compiled module is traced again for each batch size: all its batches get one size, and the padding is
ignored. Other modules get batches without padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from hetctl.runtime.data.named_arrays import fields_of


def present_device() -> torch.device:
    """Return the GPU of this rank, or the CPU if there is none."""
    # Without an index this is the GPU that set_device() has chosen.
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tensor_of(values: Any, device: torch.device) -> torch.Tensor:
    """Return values on the device; floating-point values get the default type of modules."""
    tensor = torch.as_tensor(values)
    return tensor.to(device, _type_of(tensor))


class DeviceCopies:
    """Copies of batches to the device, made while a GPU computes.

    A GPU itself reads only page-locked memory. A batch is first copied there, which frees its own memory, and
    then to the GPU in a queue of its own, for which the computation waits. The values are those of
    `tensor_of`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arrays of a batch as tensors on the device; of records, their fields by name."""
        if self._stream is None:
            return tuple(tensors_of(values, self._device) for values in arrays)
        # PyTorch keeps this memory until the copy is done, and uses it again for later batches.
        locked = tree_map(page_locked, tuple(map(fields_of, arrays)))
        with torch.cuda.stream(self._stream):
            tensors = tree_map(lambda values: values.to(self._device, non_blocking=True), locked)
        computation = torch.cuda.current_stream(self._device)
        computation.wait_stream(self._stream)
        # Otherwise the next batch would get their memory while this one is still in use.
        for tensor in tree_leaves(tensors):
            tensor.record_stream(computation)
        return tuple(tensors)


def page_locked(values: Any, *, lock: bool = True) -> torch.Tensor:
    """Return a copy of values in the node's memory, of the type that `tensor_of` gives them.

    Parameters
    ----------
    lock : bool
        Lock its pages, which needs a GPU.
    """
    tensor = torch.as_tensor(values)
    return torch.empty(tensor.shape, dtype=_type_of(tensor), pin_memory=lock).copy_(tensor)


def tensors_of(values: Any, device: torch.device) -> Any:
    """Return an array on the device as `tensor_of` does; of records, their fields by name."""
    fields = fields_of(values)
    # Not by `tree_map`, which takes longer than to copy a small batch.
    if isinstance(fields, dict):
        return {name: tensor_of(array, device) for name, array in fields.items()}
    return tensor_of(fields, device)


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor's values in the node's memory, without a copy if they are there; read-only.

    NumPy lacks bfloat16: its values become 32-bit numbers.
    """
    values = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    return np.asarray(values.numpy(force=True))


def sent_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor's values as `array_of` does, for tensors of one shape that are sent again and again.

    From a GPU they go into locked pages, which PyTorch reuses: new memory takes several times as long.
    """
    if not tensor.is_cuda:
        return array_of(tensor)
    return array_of(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach()))


def empty_array(shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array for values that go to the device next, with locked pages for a GPU."""
    if not torch.cuda.is_available():
        return np.empty(shape, dtype)
    kind = np.dtype(dtype)
    pages = torch.empty(math.prod(shape) * kind.itemsize, dtype=torch.uint8, pin_memory=True)
    return np.asarray(pages.numpy().view(kind).reshape(shape))


def mapped_outputs(function: Callable[[torch.Tensor], Any], outputs: Any) -> Any:
    """Apply a function to each tensor of a network's outputs: nested mappings and sequences."""
    if isinstance(outputs, torch.Tensor):
        return function(outputs)
    if isinstance(outputs, Mapping):
        return {name: mapped_outputs(function, value) for name, value in outputs.items()}
    return type(outputs)(mapped_outputs(function, value) for value in outputs)


def _type_of(tensor: torch.Tensor) -> torch.dtype:
    """Return the type of a network's inputs: modules' default type for floating-point values."""
    return torch.get_default_dtype() if tensor.is_floating_point() else tensor.dtype


def is_compiled(model: torch.nn.Module) -> bool:
    """Return true if ``torch.compile`` made the module, or compiled it or a part of it in place."""
    return any(
        "_orig_mod" in part._modules or part._compiled_call_impl is not None for part in model.modules()
    )


def adapt_norms(model: torch.nn.Module, is_sample: torch.Tensor | None = None) -> None:
    """Make batch normalisation use its running statistics for a single sample, and ignore padding.

    The last batch of an epoch may leave a rank with a single sample, which PyTorch rejects in training.

    Parameters
    ----------
    is_sample : torch.Tensor or None
        Shape (at least the rows of a batch,): 1 for each row that is a sample, 0 for padding; read at every
        step. None: there is no padding.
    """
    for part in model.modules():
        if isinstance(part, _BatchNorm) and not isinstance(part, torch.nn.SyncBatchNorm):
            # Another class, since hooks would split the graph of a compiled module.
            part.__class__ = _adapted(type(part))  # type: ignore[arg-type]
            if is_sample is not None:
                part.is_sample = is_sample


@lru_cache(maxsize=16)
def _adapted(norm: type[Any]) -> type[Any]:
    """Return the class of a batch normalisation whose statistics use `is_sample`; None: all rows."""

    class Adapted(norm):  # type: ignore[misc]
        is_sample: torch.Tensor | None = None

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            rows = len(inputs)
            if not self.training or self.is_sample is None or rows > len(self.is_sample):
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

    Adapted.__name__ = Adapted.__qualname__ = norm.__name__
    return Adapted


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
        # PyTorch normalises a batch by the biased variance, but tracks the unbiased one.
        unbiased = variance * count / (count - 1).clamp(min=1)
        for running, current in ((norm.running_mean, mean), (norm.running_var, unbiased)):
            updated = running + share * (current.to(running.dtype) - running)
            running.copy_(torch.where(count > 1, updated, running))
    # A branch on the value of a tensor would split the graph of a compiled module.
    several = count > 1
    return torch.where(several, mean, norm.running_mean), torch.where(several, variance, norm.running_var)


def _wide(values: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Reshape a value per channel so that it broadcasts with `inputs`."""
    return values.view(1, -1, *[1] * (inputs.dim() - 2))
