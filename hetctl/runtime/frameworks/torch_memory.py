"""Memory of layers in PyTorch, which tells what it saves for the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hetctl.runtime.frameworks.stage_network import Tensor
from hetctl.runtime.frameworks.torch_batches import empty_array, sent_array
from hetctl.runtime.worker.measuring.layer_memory import GpuMemory, MemoryGauge


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
