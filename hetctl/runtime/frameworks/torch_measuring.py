"""Measurement of layers in PyTorch: compute time, saved tensors, and tensors of other ranks."""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from hetctl.runtime.frameworks.stage_network import ComputeTime, PassedTensor, Tensor, TensorMemory
from hetctl.runtime.frameworks.torch_batches import empty_array, sent_array
from hetctl.runtime.worker.hardware import GpuMemory, MemoryGauge

Arguments = tuple[Any, ...]
"""Arguments of PyTorch's `rebuild_cuda_tensor`: kind, size, stride and offset of the tensor; kind of storage,
type, index of the GPU; handles and sizes that only PyTorch interprets.
"""


class GpuTensors(TensorMemory):
    """Tensors on this rank's GPU.

    PyTorch counts the processes that opened a tensor, and reuses its memory when none refers to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A queue beside this rank's computation: tensors that it passes on are complete.
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
        """Return PyTorch's arguments to open the tensor, as JSON; None for arrays."""
        if isinstance(tensor, np.ndarray):
            return None
        _, arguments = reduce_tensor(tensor)
        return handle_of(arguments)

    def opened(self, handle: str) -> torch.Tensor:
        """Open a tensor, which may lie on another GPU, in the context of this rank's GPU."""
        # A context on the other GPU would take memory there.
        with torch.cuda.device(self._index):
            return rebuild_cuda_tensor(*arguments_of(handle, self._index))

    def received(self, tensor: PassedTensor) -> torch.Tensor:
        """Copy an array or another rank's tensor to this rank's GPU."""
        copy = torch.as_tensor(tensor).to(self._device, copy=True)
        torch.cuda.current_stream(self._device).synchronize()
        return copy


def handle_of(arguments: Arguments) -> str:
    """Return arguments as JSON, without the constant kinds and the GPU."""
    _, size, stride, offset, _, dtype, _, *rest = arguments
    handles = [b64encode(one).decode() if isinstance(one, bytes) else one for one in rest]
    return json.dumps([size, stride, offset, str(dtype).removeprefix("torch."), handles])


def arguments_of(handle: str, device: int) -> Arguments:
    """Return the arguments of a handle, for another GPU."""
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
    """Return a copy in the kind of memory in which a stage receives tensors."""
    copy = empty_array(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def saved_bytes(forward: Callable[[], Tensor], inputs: Tensor) -> int:
    """Run a forward pass; return the bytes of its outputs and of tensors saved for the backward pass.

    Weights and tensors equal to the inputs do not count: others hold these.
    """
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        # An output itself would be part of a reference cycle.
        content = tensor.detach()
        whole = tensor if tensor._base is None else tensor._base
        # A weight is a leaf of the graph that requires a gradient.
        if not (whole.is_leaf and whole.requires_grad):
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


MS_PER_S = 1000.0
AHEAD = 2.0
"""Time for which a GPU spins, in multiples of the launch time to be hidden."""
LEAST_CYCLES, MOST_CYCLES = 100_000, 200_000_000
"""Limits of the spinning in cycles of the GPU: from 0.05 to 100 ms at 2 GHz."""


class ComputeClock:
    """Clock of a GPU's computation, by events in its queue.

    Small kernels take less time than their launches, so the GPU waits for launches. Before each span the GPU
    spins until all kernels of the span are in its queue: the events then time the kernels alone.

    Parameters
    ----------
    now : callable
        The host's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._spans: list[tuple[Any, Any, Any, float]] = []
        """Events before the spinning kernel, after it, and after the kernels; seconds to launch these."""
        self._cycles = LEAST_CYCLES

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the kernels queued inside the block."""
        queued, began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        queued.record()
        # Undocumented, but long used in PyTorch's own tests; it takes cycles of the GPU.
        torch.cuda._sleep(self._cycles)
        began.record()
        began_s = self._now()
        yield
        launch_s = self._now() - began_s
        ended.record()
        self._spans.append((queued, began, ended, launch_s))

    def taken(self) -> ComputeTime:
        """Wait for the GPU; return the time of all spans since the last call."""
        torch.cuda.synchronize()
        spans, self._spans = self._spans, []
        launches_s = [launch_s for *_, launch_s in spans]
        if spans:
            queued, began, *_ = spans[-1]
            spun_s = queued.elapsed_time(began) / MS_PER_S
            needed_s = AHEAD * max(launches_s)
            self._cycles = min(max(LEAST_CYCLES, round(self._cycles * needed_s / spun_s)), MOST_CYCLES)
        computed_ms = sum(began.elapsed_time(ended) for _, began, ended, _ in spans)
        return ComputeTime(computed_ms / MS_PER_S, sum(launches_s))
