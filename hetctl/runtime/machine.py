"""What this node is, for the record beside a measurement."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

KIBIBYTE = 1024


def gpu_and_driver() -> tuple[str, str]:
    """Return the GPU's name and driver version; without a GPU the processor's and kernel's."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        name, driver = answer.strip().splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return _processor(), f"Linux {platform.release()}"
    return name, driver


def peak_memory() -> int:
    """Return the most bytes held since `forget_peak`, on the GPU or of the node's memory."""
    return max(peak_gpu_memory(), _peak_of_the_node())


def forget_peak() -> None:
    """Begin anew to look for the most memory in use, as far as the kernel and the framework can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    tensorflow, torch = sys.modules.get("tensorflow"), sys.modules.get("torch")
    if tensorflow is not None and tensorflow.config.list_physical_devices("GPU"):
        tensorflow.config.experimental.reset_memory_stats("GPU:0")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak_of_the_node() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIBIBYTE
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE


def peak_gpu_memory() -> int:
    """Return the most bytes that the framework held on its GPU; 0 without one."""
    tensorflow, torch = sys.modules.get("tensorflow"), sys.modules.get("torch")
    if tensorflow is not None and tensorflow.config.list_physical_devices("GPU"):
        return int(tensorflow.config.experimental.get_memory_info("GPU:0")["peak"])
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return 0


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
