"""Memory of layers on this rank: of the framework's allocator on its GPU, or of the process on a slot."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hetctl.model.values import dataclass
from hetctl.runtime.agent.gpus import gpus_of_node, memory_in_use, visible_gpus
from hetctl.runtime.frameworks.stage_network import Tensor
from hetctl.runtime.worker.hardware import peak_gpu_memory, peak_of_process, reset_peak_memory

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
COPIES = 5
Kept = Callable[[Callable[[], Tensor], Tensor], int]
"""Function that runs a forward pass on inputs and returns its kept bytes; `MemoryGauge.kept_by`."""


class MemoryGauge:
    """Memory on the device of this rank: on a slot, the resident memory of the process.

    Parameters
    ----------
    kept : callable or None
        Function that returns what a forward pass keeps; None if the framework has none.
    """

    def __init__(self, kept: Kept | None = None) -> None:
        self._kept = kept

    def context_bytes(self) -> int:
        """Return the rank's bytes that belong to no tensor; call it before samples are loaded."""
        return self.used()

    def used(self) -> int:
        """Return the bytes in use now."""
        # Freed memory that stays resident would hide the needs of the next passes (glibc's malloc_trim(3)).
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES

    def reset_peak(self) -> None:
        """Restart the measurement of the peak."""
        reset_peak_memory()

    def peak(self) -> int:
        """Return the peak of the bytes in use since `reset_peak`."""
        return peak_of_process()

    def received_bytes(self, _inputs: Tensor) -> int:
        """Return the bytes that inputs take on the device, beside the node's memory."""
        return 0

    def kept_by(self, forward: Callable[[], Tensor], inputs: Tensor) -> int:
        """Run a forward pass; return the bytes that it keeps for the backward pass, without its inputs.

        Without a figure from the framework, this is the growth of the bytes in use.
        """
        if self._kept is not None:
            return self._kept(forward, inputs)
        before = self.used()
        outputs = forward()
        return max(outputs.nbytes, self.used() - before - inputs.nbytes)

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""

    def copy_s(self, _array: Tensor) -> float:
        """Return the seconds in which an array is copied to the device or back; 0 on a slot."""
        return 0.0


@dataclass(frozen=True)
class GpuMemory(MemoryGauge):
    """Memory of a GPU, by functions of the framework.

    Parameters
    ----------
    device : int
        Index among the visible GPUs.
    allocated, reserved : callable
        Functions that return the bytes of tensors, and the bytes that the allocator has from the driver.
    wait : callable
        Function that waits for the GPU.
    there_and_back : callable
        Function that copies an array to the GPU and back.
    as_received : callable
        Function that copies an array to memory in which a stage receives tensors.
    kept : callable or None
        Function that returns what a forward pass keeps; None if the framework has none.
    """

    device: int
    allocated: Callable[[], int]
    reserved: Callable[[], int]
    wait: Callable[[], None]
    there_and_back: Callable[[Tensor], Any]
    as_received: Callable[[Tensor], Tensor] = lambda array: array
    kept: Kept | None = None

    def context_bytes(self) -> int:
        """Return the process's bytes on the GPU beyond the allocator's."""
        self.there_and_back(np.zeros(1, np.float32))
        gpus = visible_gpus(gpus_of_node(), os.environ)
        in_use = memory_in_use(gpus[self.device], os.getpid()) if self.device < len(gpus) else None
        return max(0, (in_use or 0) - self.reserved())

    def used(self) -> int:
        """Return the bytes of all tensors."""
        return self.allocated()

    def peak(self) -> int:
        """Return the peak of the bytes of all tensors."""
        return peak_gpu_memory()

    def synchronize(self) -> None:
        """Wait for the GPU."""
        self.wait()

    def received_bytes(self, inputs: Tensor) -> int:
        """Return the bytes of the inputs' copy on the GPU."""
        return inputs.nbytes

    def kept_by(self, forward: Callable[[], Tensor], inputs: Tensor) -> int:
        """Return the framework's figure, or else the bytes that the pass allocates."""
        if self.kept is not None:
            return self.kept(forward, inputs)
        before = self.allocated()
        forward()
        return max(0, self.allocated() - before - self.received_bytes(inputs))

    def copy_s(self, array: Tensor) -> float:
        """Return half the shortest time of a copy there and back."""
        received = self.as_received(array)
        return min(_seconds(lambda: self.there_and_back(received)) for _ in range(COPIES)) / 2


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
