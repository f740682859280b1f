"""Hardware of this node, for records of measurements, its memory, and live metrics of a member.

A thread of its own sends live metrics every few seconds, without delaying training.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import sys
import threading
import time
import timeit
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetctl.model.profile import Hardware
from hetctl.model.training_progress import LiveMetrics, RankShare
from hetctl.model.training_settings import FRAMEWORKS
from hetctl.model.values import dataclass
from hetctl.runtime.agent.gpus import gpus_of_node, memory_in_use, utilization, visible_gpus
from hetctl.runtime.agent.rank_memory import private_bytes

if TYPE_CHECKING:
    from hetctl.runtime.frameworks import Framework
    from hetctl.runtime.frameworks.stage_network import Tensor


KIBIBYTE = 1024
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
COPIES = 5
SAMPLE_EVERY_S = 0.5
"""Seconds over which the use of a node's cores is averaged."""


def hardware_here(gpu_type: str | None, framework: str) -> Hardware:
    """Return this process's first GPU and its driver; without a GPU, the processor and the kernel.

    Parameters
    ----------
    gpu_type : str or None
        Name of the GPU in the site file; None: its own.
    framework : str
        Name and version of the framework.
    """
    gpus = visible_gpus(gpus_of_node(), os.environ)
    name, driver = (gpus[0].name, gpus[0].driver) if gpus else (_processor(), f"Linux {platform.release()}")
    return Hardware(gpu_type or name, driver, framework)


_earlier_peak = 0
"""Peak of memory on the GPU from `reset_peak_memory` to the last `peak_of_last_steps`, in bytes."""


def peak_memory() -> int:
    """Return the peak of memory since `reset_peak_memory` in bytes: on the GPU, else of the process."""
    return peak_gpu_memory() or peak_of_process()


def reset_peak_memory() -> None:
    """Restart the measurement of peak memory, as far as kernel and framework support it."""
    global _earlier_peak
    with suppress(OSError):
        # 5 resets VmHWM, the peak of resident memory (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")
    for framework in loaded_frameworks():
        framework.reset_peak_memory()
    _earlier_peak = 0


def peak_of_process() -> int:
    """Return the peak of the process's resident memory since `reset_peak_memory`, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIBIBYTE
    # It counts KiB on Linux, and cannot be reset (getrusage(2)).
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE


def peak_gpu_memory() -> int:
    """Return the peak of memory on the GPU since `reset_peak_memory` in bytes; 0 without a GPU."""
    return max([_earlier_peak, *(framework.peak_gpu_memory() for framework in loaded_frameworks())])


def peak_of_last_steps() -> int:
    """Return the peak of memory on the GPU since the last call in bytes; 0 without a GPU."""
    global _earlier_peak
    peak = 0
    for framework in loaded_frameworks():
        peak = max(peak, framework.peak_gpu_memory())
        framework.reset_peak_memory()
    _earlier_peak = max(_earlier_peak, peak)
    return peak


def loaded_frameworks() -> Iterator[Framework]:
    """Yield the frameworks that this process has loaded; importing others would take seconds."""
    for entry in FRAMEWORKS.values():
        if module := sys.modules.get(entry.module):
            yield module.FRAMEWORK


class NodeLoad:
    """Processor and memory of this rank's node, as LB-BSP's predictors use them (section 3.2.2)."""

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        self._times = _processor_times()
        self._gpu_bytes = max((framework.gpu_memory() for framework in loaded_frameworks()), default=0)
        self._sampled_at = (0.0, 0.0)
        self._available = 1.0
        self._used = 0.0

    def sample(self) -> tuple[float, float]:
        """Return the share of the node's cores that other processes leave, and the share of memory in use.

        The node's figures are of the last `SAMPLE_EVERY_S`. A GPU's memory counts at its peak since the last
        call: with an earlier peak, a worker that once had larger batches could not get them again.
        """
        now = time.monotonic()
        # Reading /proc takes longer than the rest of a step's accounting.
        if now - self._sampled_at[0] >= SAMPLE_EVERY_S:
            sampled_at, own_before = self._sampled_at
            self._sampled_at = now, time.process_time()
            own_share = (self._sampled_at[1] - own_before) / (now - sampled_at) / self._cores
            before, self._times = self._times, _processor_times()
            idle, total = (now - then for now, then in zip(self._times, before, strict=True))
            self._available = min(1.0, max(0.0, (idle / total if total else 1.0) + own_share))
            # The share that new processes cannot have without swapping (proc(5)).
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
            self._used = 1.0 - sizes["MemAvailable"] / sizes["MemTotal"]
        return self._available, peak_of_last_steps() / self._gpu_bytes if self._gpu_bytes else self._used


def _processor_times() -> tuple[int, int]:
    """Return the idle and total times of the node's cores since its start, in clock ticks (proc(5))."""
    # Not by psutil, which an image with a framework need not have; guest times count as user times already.
    with Path("/proc/stat").open(encoding="ascii") as stat:
        times = [int(word) for word in stat.readline().split()[1:9]]
    return times[3] + times[4], sum(times)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


class MemoryGauge:
    """Memory on the device of this rank: on a slot, the resident memory of the process.

    Parameters
    ----------
    kept : callable or None
        Function that runs a forward pass on inputs and returns what it keeps; None if the framework has none.
    """

    def __init__(self, kept: Callable[[Callable[[], Tensor], Tensor], int] | None = None) -> None:
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
        As in `MemoryGauge`.
    """

    device: int
    allocated: Callable[[], int]
    reserved: Callable[[], int]
    wait: Callable[[], None]
    there_and_back: Callable[[Tensor], Any]
    as_received: Callable[[Tensor], Tensor] = lambda array: array
    kept: Callable[[Callable[[], Tensor], Tensor], int] | None = None

    def context_bytes(self) -> int:
        """Return the process's bytes on the GPU beyond the allocator's."""
        self.there_and_back(np.zeros(1, np.float32))
        gpus = visible_gpus(gpus_of_node(), os.environ)
        in_use = memory_in_use(gpus[self.device], (os.getpid(),)) if self.device < len(gpus) else None
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
        return min(timeit.repeat(lambda: self.there_and_back(received), number=1, repeat=COPIES)) / 2


def memory_of_commands(device: int | None, pids: Collection[int]) -> int:
    """Return the bytes that a rank's commands use: on its GPU, of which 0 is unknown, or on a slot.

    Parameters
    ----------
    device : int or None
        Index of the GPU, which nobody else uses, among those that this process sees; None: the rank has none.
    """
    if device is None:
        return sum(map(private_bytes, pids))
    gpus = visible_gpus(gpus_of_node(), os.environ)[device:]
    return memory_in_use(gpus[0], pids) or 0 if gpus else 0


EVERY_S = 2.0

Send = Callable[..., None]
Busy = Callable[[], float | None]
"""Function that returns a device's used share (0 to 1) since its last call; None if unknown."""


@contextmanager
def live_metrics_to(
    send: Send,
    samples: int,
    busy: Busy,
    shares: Callable[[], tuple[RankShare, ...]] = tuple,
    every_s: float = EVERY_S,
) -> Iterator[Callable[[int, int, Any], None]]:
    """Yield a function to call after each step with the epoch, its finished samples, and the loss.

    Parameters
    ----------
    send : callable
        Function that sends `metrics` to the driver; a closed connection is ignored.
    samples : int
        Samples of an epoch; 0: not known.
    shares : callable
        Function that returns the parts of the group's ranks in the last step.
    every_s : float
        Seconds between two reports.
    """
    over = threading.Event()
    seen: tuple[int, int, Any] | None = None

    def note(epoch: int, position: int, loss: Any) -> None:
        nonlocal seen
        # One assignment of a tuple: the other thread never sees half an update.
        seen = (epoch, position, loss)

    def send_repeatedly() -> None:
        last_at, last = time.time(), (0, 0)
        while not over.wait(every_s):
            if seen is None:
                continue
            (epoch, position, loss), now = seen, time.time()
            # If an epoch's length is unknown, the rate across its end is, too.
            if last[0] and (samples or epoch == last[0]):
                done = (epoch - last[0]) * samples + position - last[1]
                rate = max(0.0, done / (now - last_at))
                # Reading the loss waits for the GPU; the training thread must not.
                metrics = LiveMetrics(
                    *(now, epoch, position, samples, rate, _number(loss), busy()), ranks=shares()
                )
                with suppress(ConnectionError):
                    send(metrics=metrics)
            last_at, last = now, (epoch, position)

    thread = threading.Thread(target=send_repeatedly, name="live-metrics", daemon=True)
    thread.start()
    try:
        yield note
    finally:
        over.set()
        thread.join()


def busy_share(device: int | None, cpu_seconds: Callable[[], float] = time.process_time) -> Busy:
    """Return a function that gives the used share of a rank's GPU or cores since its last call.

    Parameters
    ----------
    device : int or None
        Index of the GPU among those that this process sees; None: the rank has only cores.
    cpu_seconds : callable
        Function that returns the CPU time that training has used, in seconds.
    """
    if device is not None:
        gpu = next(iter(visible_gpus(gpus_of_node(), os.environ)[device:]), None)
        return lambda: None if gpu is None else utilization(gpu)
    last = [time.monotonic(), cpu_seconds()]

    def share() -> float:
        wall, cpu = time.monotonic(), cpu_seconds()
        used = (cpu - last[1]) / max(wall - last[0], 1e-9) / len(os.sched_getaffinity(0))
        last[:] = [wall, cpu]
        # A process that has ended takes its time with it.
        return min(1.0, max(0.0, used))

    return share


def _number(loss: Any) -> float | None:
    try:
        value = float(loss)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
