"""PyTorch's tensors of arrays in the node's memory, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hetctl.runtime.data.named_arrays import fields_of


def present_device() -> torch.device:
    """Return the GPU of this rank, or the CPU if there is none."""
    # Without an index this is the GPU that set_device() has chosen.
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tensor_of(values: Any, device: torch.device) -> torch.Tensor:
    """Return values on the device; floating-point values get the default type of modules."""
    tensor = torch.as_tensor(values)
    return tensor.to(device, _type_of(tensor))


class Uploads:
    """Copies of batches to the device, which on a GPU go on while it computes.

    The GPU can only read page-locked memory by itself. A batch is copied there first, so that its own memory
    may be overwritten at once, and then in a queue beside that of the computation, which waits for it. The
    values are those of `tensor_of`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arrays of a batch as tensors on the device; of records, their fields by name."""
        if self._copies is None:
            return tuple(tensors_of(values, self._device) for values in arrays)
        # Kept by PyTorch until the copy from it is done, and then used for later batches.
        locked = [_mapped(page_locked, fields_of(values)) for values in arrays]
        with torch.cuda.stream(self._copies):
            tensors = _mapped(lambda values: values.to(self._device, non_blocking=True), locked)
        computation = torch.cuda.current_stream(self._device)
        computation.wait_stream(self._copies)
        # Or their memory would be given to the next batch while this one is still in use.
        _mapped(lambda tensor: tensor.record_stream(computation), tensors)
        return tuple(tensors)


def _mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    """Apply a function to the leaves of lists and mappings; return the same nest of its results."""
    if isinstance(nest, dict):
        return {name: _mapped(function, value) for name, value in nest.items()}
    return [_mapped(function, value) for value in nest] if isinstance(nest, list) else function(nest)


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
    return _mapped(lambda array: tensor_of(array, device), fields_of(values))


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor's values in the node's memory, without a copy if they are there; read-only.

    NumPy lacks bfloat16: its values become 32-bit numbers.
    """
    values = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    return np.asarray(values.numpy(force=True))


def array_nest(outputs: Any) -> Any:
    """Return outputs of a network with arrays in the place of tensors, as `array_of` returns them."""
    if isinstance(outputs, torch.Tensor):
        return array_of(outputs)
    if isinstance(outputs, Mapping):
        return {key: array_nest(value) for key, value in outputs.items()}
    return tuple(map(array_nest, outputs))


def _type_of(tensor: torch.Tensor) -> torch.dtype:
    """Return the type that a network gets values in: for floating-point ones the default type of modules."""
    return torch.get_default_dtype() if tensor.is_floating_point() else tensor.dtype
