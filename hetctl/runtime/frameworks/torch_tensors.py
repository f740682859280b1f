"""PyTorch's tensors of arrays in the node's memory, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


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

    def __call__(self, arrays: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return the arrays of a batch as tensors on the device."""
        if self._copies is None:
            return tuple(tensor_of(values, self._device) for values in arrays)
        # Kept by PyTorch until the copy from it is done, and then used for later batches.
        locked = [page_locked(values) for values in arrays]
        with torch.cuda.stream(self._copies):
            tensors = tuple(values.to(self._device, non_blocking=True) for values in locked)
        computation = torch.cuda.current_stream(self._device)
        computation.wait_stream(self._copies)
        for tensor in tensors:
            # Or its memory would be given to the next batch while this one is still in use.
            tensor.record_stream(computation)
        return tensors


def page_locked(values: Any, *, lock: bool = True) -> torch.Tensor:
    """Return a copy of values in the node's memory, of the type that `tensor_of` gives them.

    Parameters
    ----------
    lock : bool
        Lock its pages, which needs a GPU.
    """
    tensor = torch.as_tensor(values)
    return torch.empty(tensor.shape, dtype=_type_of(tensor), pin_memory=lock).copy_(tensor)


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
