"""Tensors on a rank's GPU that other ranks of the node open where they are, by CUDA or HIP IPC."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from hetctl.runtime.frameworks.stage_network import PassedTensor, Tensor, TensorMemory
from hetctl.runtime.frameworks.torch_batches import empty_array, sent_array

Arguments = tuple[Any, ...]
"""Arguments of PyTorch's `rebuild_cuda_tensor`: kind, size, stride and offset of the tensor; kind of storage,
type, index of the GPU; handles and sizes, of which only PyTorch knows more.
"""


def tensor_memory(device: torch.device) -> TensorMemory:
    """Return the memory for tensors of stages on a device."""
    return GpuTensors(device) if device.type == "cuda" else TensorMemory()


class GpuTensors(TensorMemory):
    """Tensors on this rank's GPU.

    PyTorch counts who has opened a tensor, and uses its memory again when nobody refers to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Not behind what this rank computes meanwhile: what it passes on is complete.
        self._copies = torch.cuda.Stream(device)
        self._index = torch.cuda.current_device()

    def filled(self, value: float, size: int) -> torch.Tensor:
        """Return a tensor with one value."""
        tensor = torch.full((size,), value, dtype=torch.float32, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()
        return tensor

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Tensor:
        """Return an array with locked pages."""
        return empty_array(shape, dtype)

    def array(self, tensor: PassedTensor) -> Tensor:
        """Copy a tensor to locked pages."""
        if isinstance(tensor, np.ndarray):
            return tensor
        with torch.cuda.stream(self._copies):
            return sent_array(tensor)

    def exported(self, tensor: PassedTensor) -> str | None:
        """Return the arguments with which PyTorch opens it, as JSON; None for arrays."""
        if isinstance(tensor, np.ndarray):
            return None
        _, arguments = reduce_tensor(tensor)
        return handle_of(arguments)

    def opened(self, handle: str) -> torch.Tensor:
        """Open a tensor in the context of this rank's GPU, which need not be the one that holds it."""
        # On the other GPU this process would need a context, which takes memory there.
        with torch.cuda.device(self._index):
            return rebuild_cuda_tensor(*arguments_of(handle, self._index))

    def received(self, tensor: PassedTensor) -> torch.Tensor:
        """Copy an array, or a tensor that another rank has, to this rank's GPU."""
        copy = torch.as_tensor(tensor).to(self._device, copy=True)
        torch.cuda.current_stream(self._device).synchronize()
        return copy


def handle_of(arguments: Arguments) -> str:
    """Return arguments as JSON, without the kinds, which are always the same, and the GPU."""
    _, size, stride, offset, _, dtype, _, *rest = arguments
    handles = [b64encode(one).decode() if isinstance(one, bytes) else one for one in rest]
    return json.dumps([size, stride, offset, str(dtype).removeprefix("torch."), handles])


def arguments_of(handle: str, device: int) -> Arguments:
    """Return the arguments that `handle_of` was given, for another GPU."""
    size, stride, offset, dtype, handles = json.loads(handle)
    rest = [b64decode(one) if isinstance(one, str) else one for one in handles]
    shape = torch.Size(size), tuple(stride), offset
    return torch.Tensor, *shape, torch.TypedStorage, getattr(torch, dtype), device, *rest
