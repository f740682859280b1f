"""PyTorch's tensors of arrays in the node's memory, and back."""

from __future__ import annotations

from collections.abc import Mapping
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
    return tensor.to(device, torch.get_default_dtype() if tensor.is_floating_point() else tensor.dtype)


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
