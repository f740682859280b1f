"""Tensors on a rank's GPU that other ranks of the node open where they are, by CUDA or HIP IPC."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from hetctl.runtime.frameworks.stage_network import NodeMemory, PassedTensor, Tensor, TensorMemory
from hetctl.runtime.frameworks.torch_batches import empty_array, sent_array

STORAGE_DEVICE = 6
"""Place of the GPU's index among the arguments of `rebuild_cuda_tensor`."""


def tensor_memory(device: torch.device) -> TensorMemory:
    """Return the memory for tensors of stages on a device."""
    return GpuTensors(device) if device.type == "cuda" else NodeMemory()


class GpuTensors:
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
        """Return the pickled arguments with which PyTorch opens it; None for arrays."""
        if isinstance(tensor, np.ndarray):
            return None
        _, arguments = reduce_tensor(tensor)
        return base64.b64encode(pickle.dumps(arguments)).decode()

    def opened(self, handle: str) -> torch.Tensor:
        """Open a tensor in the context of this rank's GPU, which need not be the one that holds it."""
        # From a rank of the same user, over a connection with the run's key.
        arguments = list(pickle.loads(base64.b64decode(handle)))
        # On the other GPU this process would need a context, which takes memory there.
        arguments[STORAGE_DEVICE] = self._index
        with torch.cuda.device(self._index):
            return rebuild_cuda_tensor(*arguments)

    def received(self, tensor: PassedTensor) -> torch.Tensor:
        """Copy an array, or a tensor that another rank has, to this rank's GPU."""
        copy = torch.as_tensor(tensor).to(self._device, copy=True)
        torch.cuda.current_stream(self._device).synchronize()
        return copy
