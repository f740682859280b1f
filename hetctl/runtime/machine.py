"""What this node is, for the record beside a measurement."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
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
    """Return the most bytes that this process held, on its GPU or of the node's memory."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE
    return max(peak_gpu_memory(), own)


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
