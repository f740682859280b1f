"""Memory of layers on this rank: that of the framework's allocator on its GPU, or of the process on a slot.

PyTorch and TensorFlow are used only if the member's framework has loaded them.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hetctl.runtime.agent.gpus import gpus_of_node, memory_in_use, visible_gpus
from hetctl.runtime.frameworks.stage_network import Tensor
from hetctl.runtime.worker.hardware import peak_gpu_memory, peak_of_process, reset_peak_memory

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
COPIES = 5
CPU = "CPU:0"
"""TensorFlow's name of the CPU."""
POOLED_BYTES = 2**20
"""Size of a tensor in oneDNN's pool, which leaves those below 256 KiB to the C library."""


class MemoryGauge(Protocol):
    """Memory on the device of this rank."""

    def context_bytes(self) -> int:
        """Return the bytes of this rank that belong to no tensor: those of framework and libraries."""

    def used(self) -> int:
        """Return the bytes in use now."""

    def reset_peak(self) -> None:
        """Restart the measurement of the peak."""

    def peak(self) -> int:
        """Return the peak of the bytes in use since `reset_peak`."""

    def received_bytes(self, inputs: Tensor) -> int:
        """Return the bytes that inputs take on the device in addition to those in the node's memory."""

    def kept_by(self, forward: Callable[[], Tensor], inputs: Tensor) -> int:
        """Run a forward pass; return the bytes that it keeps for the backward pass, without its inputs."""

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""

    def copy_s(self, array: Tensor) -> float:
        """Return the seconds in which an array is copied to the device or back; 0 on a slot."""


def memory_gauge(device: int | None) -> MemoryGauge:
    """Return the gauge for this rank's framework and device.

    Parameters
    ----------
    device : int or None
        Index of the rank's GPU among the visible ones; None for a slot.
    """
    tensorflow, torch = sys.modules.get("tensorflow"), sys.modules.get("torch")
    if tensorflow is not None and tensorflow.config.list_physical_devices("GPU"):
        return _tensorflow_gpu(tensorflow, device or 0)
    if torch is not None and torch.cuda.is_available():
        return _torch_gpu(torch, device or 0)
    if torch is None and tensorflow is not None and _has_pool(tensorflow):
        return PoolMemory(tensorflow)
    return ProcessMemory(torch)


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU, by functions of the framework.

    Parameters
    ----------
    device : int
        Index among the visible GPUs.
    allocated, reserved : callable
        Functions that return the bytes of tensors, and those that the allocator has taken from the driver.
    synchronize : callable
        Function that waits for the GPU.
    there_and_back : callable
        Function that copies an array to the GPU and back.
    torch : module or None
        PyTorch; None: another framework.
    """

    device: int
    allocated: Callable[[], int]
    reserved: Callable[[], int]
    synchronize: Callable[[], None]
    there_and_back: Callable[[Tensor], Any]
    torch: Any = None

    def context_bytes(self) -> int:
        """Return what the process has on the GPU beyond the allocator's memory."""
        self.there_and_back(np.zeros(1, np.float32))
        gpus = visible_gpus(gpus_of_node(), os.environ)
        in_use = memory_in_use(gpus[self.device], os.getpid()) if self.device < len(gpus) else None
        return max(0, (in_use or 0) - self.reserved())

    def used(self) -> int:
        """Return the bytes of all tensors."""
        return self.allocated()

    def reset_peak(self) -> None:
        """Restart the framework's measurement of the peak."""
        reset_peak_memory()

    def peak(self) -> int:
        """Return the peak of the bytes of all tensors."""
        return peak_gpu_memory()

    def received_bytes(self, inputs: Tensor) -> int:
        """Return the bytes of their copy on the GPU."""
        return inputs.nbytes

    def kept_by(self, forward: Callable[[], Tensor], inputs: Tensor) -> int:
        """Return what PyTorch keeps; with another framework the bytes allocated by the pass."""
        if self.torch is not None:
            return saved_bytes(self.torch, forward, inputs)
        before = self.allocated()
        forward()
        return max(0, self.allocated() - before - self.received_bytes(inputs))

    def copy_s(self, array: Tensor) -> float:
        """Return half the least time of a copy there and back."""
        return min(_seconds(lambda: self.there_and_back(array)) for _ in range(COPIES)) / 2


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _torch_gpu(torch: Any, device: int) -> GpuMemory:
    return GpuMemory(
        device=device,
        allocated=torch.cuda.memory_allocated,
        reserved=torch.cuda.memory_reserved,
        synchronize=torch.cuda.synchronize,
        there_and_back=lambda array: torch.as_tensor(array).to("cuda").cpu(),
        torch=torch,
    )


def _tensorflow_gpu(tensorflow: Any, device: int) -> GpuMemory:
    def allocated() -> int:
        return int(tensorflow.config.experimental.get_memory_info("GPU:0")["current"])

    def there_and_back(array: Tensor) -> None:
        with tensorflow.device("GPU:0"):
            tensorflow.identity(array).numpy()

    return GpuMemory(
        device=device,
        allocated=allocated,
        # It does not tell what its allocator has taken; before the first layer that is hardly more.
        reserved=allocated,
        synchronize=tensorflow.test.experimental.sync_devices,
        there_and_back=there_and_back,
    )


class ProcessMemory:
    """Resident memory of the process, for a slot.

    Parameters
    ----------
    torch : module or None
        PyTorch, which tells what it saves for the backward pass; None: another framework.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def context_bytes(self) -> int:
        """Return the resident memory: no samples are loaded yet."""
        return self.used()

    def used(self) -> int:
        """Return the resident memory without what the allocator of the C library keeps unused."""
        # Freed memory that stays resident would hide what the next passes need (malloc_trim(3), in glibc).
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES

    def reset_peak(self) -> None:
        """Restart the kernel's measurement of the peak."""
        reset_peak_memory()

    def peak(self) -> int:
        """Return the peak of resident memory."""
        return peak_of_process()

    def received_bytes(self, _inputs: Tensor) -> int:
        """Return 0: a slot computes with the node's memory."""
        return 0

    def kept_by(self, forward: Callable[[], Tensor], inputs: Tensor) -> int:
        """Return what PyTorch keeps; with another framework the bytes in use more, without the inputs."""
        if self._torch is not None:
            return saved_bytes(self._torch, forward, inputs)
        before = self.used()
        outputs = forward()
        return max(outputs.nbytes, self.used() - before - inputs.nbytes)

    def synchronize(self) -> None:
        """Do nothing: operations end before they return."""

    def copy_s(self, _array: Tensor) -> float:
        """Return 0: nothing is copied."""
        return 0.0


class PoolMemory(ProcessMemory):
    """Memory of TensorFlow on a slot, by its own count.

    The pool of oneDNN keeps what is freed: the resident memory would hide what the next passes need.

    Parameters
    ----------
    tensorflow : module
        TensorFlow.
    """

    def __init__(self, tensorflow: Any) -> None:
        super().__init__(None)
        self._config = tensorflow.config.experimental

    def context_bytes(self) -> int:
        """Return the resident memory: no samples are loaded yet."""
        return super().used()

    def used(self) -> int:
        """Return the bytes of all tensors."""
        return int(self._config.get_memory_info(CPU)["current"])

    def reset_peak(self) -> None:
        """Restart TensorFlow's measurement of the peak."""
        self._config.reset_memory_stats(CPU)

    def peak(self) -> int:
        """Return the peak of the bytes of all tensors."""
        return int(self._config.get_memory_info(CPU)["peak"])


def _has_pool(tensorflow: Any) -> bool:
    """Return true if TensorFlow counts tensors in the node's memory, as the pool of oneDNN does."""
    tensor = tensorflow.zeros(POOLED_BYTES, tensorflow.uint8)
    try:
        counted: int = tensorflow.config.experimental.get_memory_info(CPU)["current"]
    except ValueError:  # It runs without oneDNN.
        return False
    return counted >= int(tensorflow.size(tensor))


def saved_bytes(torch: Any, forward: Callable[[], Tensor], inputs: Tensor) -> int:
    """Run a forward pass; return the bytes of its outputs and of what PyTorch saves for the backward pass.

    Weights, and tensors equal to the inputs, do not count: other layers, or receivers, hold those.
    """
    saved: dict[int, Any] = {}

    def note(tensor: Any) -> Any:
        # The tensor itself, if it is an output, would be part of a reference cycle.
        content = tensor.detach()
        if not _is_weight(tensor):
            saved[tensor.untyped_storage().data_ptr()] = content
        return content

    with torch.autograd.graph.saved_tensors_hooks(note, lambda content: content):
        outputs = forward()
    passing = [torch.as_tensor(array).reshape(-1) for array in (inputs, outputs)]
    inner = (one for one in saved.values() if not any(_equal(torch, one, array) for array in passing))
    return outputs.nbytes + sum(int(one.untyped_storage().nbytes()) for one in inner)


def _equal(torch: Any, tensor: Any, values: Any) -> bool:
    alike = tensor.dtype == values.dtype and tensor.numel() == values.numel()
    return bool(alike and torch.equal(tensor.reshape(-1).cpu(), values))


def _is_weight(tensor: Any) -> bool:
    """Return true for a weight or a view of one: a leaf of the graph whose gradient is wanted."""
    whole = tensor if tensor._base is None else tensor._base
    return bool(whole.is_leaf and whole.requires_grad)
