"""Hardware of this node, recorded beside a measurement."""

from __future__ import annotations

import os
import platform
import resource
import sys
from contextlib import suppress
from pathlib import Path

from hetctl.runtime.agent.gpus import gpus_of_node, visible_gpus

KIBIBYTE = 1024


def gpu_and_driver() -> tuple[str, str]:
    """Return name and driver of this process's first GPU; without a GPU those of processor and kernel."""
    for gpu in visible_gpus(gpus_of_node(), os.environ):
        return gpu.name, gpu.driver
    return _processor(), f"Linux {platform.release()}"


def peak_memory() -> int:
    """Return the peak of memory since `reset_peak_memory` in bytes: on the GPU or of the process."""
    return max(peak_gpu_memory(), _peak_of_the_node())


def reset_peak_memory() -> None:
    """Restart the measurement of the peak of memory, as far as kernel and framework support it."""
    with suppress(OSError):
        # 5 resets VmHWM, the peak of resident memory (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")
    # Only a framework that is loaded: an import would take seconds.
    tensorflow, torch = sys.modules.get("tensorflow"), sys.modules.get("torch")
    if tensorflow is not None and tensorflow.config.list_physical_devices("GPU"):
        tensorflow.config.experimental.reset_memory_stats("GPU:0")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak_of_the_node() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIBIBYTE
    # It counts KiB on Linux, and cannot be reset (getrusage(2)).
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE


def peak_gpu_memory() -> int:
    """Return the framework's peak of memory on its GPU in bytes; 0 without a GPU."""
    tensorflow, torch = sys.modules.get("tensorflow"), sys.modules.get("torch")
    if tensorflow is not None and tensorflow.config.list_physical_devices("GPU"):
        # The only GPU that set_visible_devices() has left is number 0, whichever it is on the node.
        return int(tensorflow.config.experimental.get_memory_info("GPU:0")["peak"])
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return 0


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
