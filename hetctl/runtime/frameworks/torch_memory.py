"""Memory of tensors in PyTorch: those that other ranks open where they are, and what layers save."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from hetctl.runtime.frameworks.stage_network import PassedTensor, Tensor, TensorMemory
from hetctl.runtime.frameworks.torch_batches import empty_array, sent_array
from hetctl.runtime.worker.measuring.layer_memory import GpuMemory, MemoryGauge

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


def memory_gauge(device: int | None) -> MemoryGauge:
    """Return the gauge for a rank's device, as in `Framework.memory_gauge`."""
    if not torch.cuda.is_available():
        return MemoryGauge(saved_bytes)
    return GpuMemory(
        device=device or 0,
        allocated=torch.cuda.memory_allocated,
        reserved=torch.cuda.memory_reserved,
        wait=torch.cuda.synchronize,
        there_and_back=lambda array: sent_array(torch.as_tensor(array).to("cuda")),
        as_received=as_received,
        kept=saved_bytes,
    )


def as_received(array: Tensor) -> Tensor:
    """Return a copy in memory like that of tensors that a stage receives."""
    copy = empty_array(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def saved_bytes(forward: Callable[[], Tensor], inputs: Tensor) -> int:
    """Run a forward pass; return the bytes of its outputs and of what PyTorch saves for the backward pass.

    Weights, and tensors equal to the inputs, do not count: other layers, or receivers, hold those.
    """
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        # The tensor itself, if it is an output, would be part of a reference cycle.
        content = tensor.detach()
        if not _is_weight(tensor):
            saved[tensor.untyped_storage().data_ptr()] = content
        return content

    with torch.autograd.graph.saved_tensors_hooks(note, lambda content: content):
        outputs = forward()
    passing = [torch.as_tensor(array).reshape(-1) for array in (inputs, outputs)]
    inner = (one for one in saved.values() if not any(_equal(one, array) for array in passing))
    return outputs.nbytes + sum(int(one.untyped_storage().nbytes()) for one in inner)


def _equal(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    alike = tensor.dtype == values.dtype and tensor.numel() == values.numel()
    return bool(alike and torch.equal(tensor.reshape(-1).cpu(), values))


def _is_weight(tensor: torch.Tensor) -> bool:
    """Return true for a weight or a view of one: a leaf of the graph whose gradient is wanted."""
    whole = tensor if tensor._base is None else tensor._base
    return bool(whole.is_leaf and whole.requires_grad)
