"""GPUs of this node, as NVIDIA's and AMD's management libraries describe them.

The vendors' Python packages are ``pynvml`` (``nvidia-ml-py`` on PyPI) and ``amdsmi`` (part of ROCm). Without
the package, its library or the driver, no GPUs are found.

Both libraries list all GPUs that this process's control group permits, independent of
``CUDA_VISIBLE_DEVICES`` and the like; `visible_gpus` applies those variables.

The index of a GPU
    NVML guarantees no order that survives a reboot, and none that CUDA shares ("The NVML index may not
    correlate with other APIs, such as the CUDA device index", nvmlDeviceGetHandleByIndex_v2). CUDA puts the
    fastest GPU first by default, and orders by PCI bus address with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``
    (https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html). An index
    here is the position in the order of bus addresses: CUDA's index in a process with ``PCI_BUS_ID`` that
    sees all GPUs. On AMD it is HIP's index if AMD SMI provides it (ROCm 6.4 and later), or else the position
    by bus address. Only the UUID has no such conditions.

MIG
    In place of a GPU in MIG mode its MIG devices are listed, each with its own name, UUID and memory. A CUDA
    process uses at most one of them, the one that ``CUDA_VISIBLE_DEVICES`` names by UUID
    (https://docs.nvidia.com/datacenter/tesla/mig-user-guide/), and NVML gives no utilization of a GPU in that
    mode (nvmlDeviceGetUtilizationRates).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from hetctl.model.values import dataclass

T = TypeVar("T")

PCI_DEVICES = Path("/sys/bus/pci/devices")
WORD_BITS = 64
"""Width of a word in bits: NVML's masks of CPUs are arrays of C's ``unsigned long``."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of this node.

    Parameters
    ----------
    index : int
        Position among the node's GPUs of one vendor, as the module describes.
    vendor : str
        Key of `VENDORS`.
    uuid : str
        UUID that ``CUDA_VISIBLE_DEVICES`` or ``ROCR_VISIBLE_DEVICES`` accepts.
    bus_address : str
        PCI ``domain:bus:device.function``, in the form of the folders in `PCI_DEVICES`.
    driver : str
        Version of the kernel driver.
    memory : int or None
        Total memory in bytes; None if unknown.
    cores : tuple of int
        Logical CPUs of the same NUMA node; empty if unknown.
    whole : str
        UUID of the GPU of which it is a MIG device; empty for a whole GPU.
    """

    index: int
    vendor: str
    uuid: str
    bus_address: str
    name: str
    driver: str
    memory: int | None
    cores: tuple[int, ...]
    whole: str = ""


@dataclass(frozen=True)
class Vendor:
    """A vendor's management library.

    Parameters
    ----------
    package, start : str
        Python package, and its function that starts the library.
    read : callable
        Function that returns the GPUs, in the order of their indices.
    utilization : callable
        Function that returns the percentage of busy time of the GPU at a PCI bus address.
    links : callable or None
        Function that returns the number of active links of the GPU at a PCI bus address; None if unavailable.
    memory_in_use : callable
        Function that returns the bytes that processes use on the GPU at a PCI bus address.
    energy : callable
        Function that returns the joules that the GPU at a PCI bus address has used since its driver was
        loaded.
    variables : tuple of tuple of str
        Variables that restrict the visible GPUs. Each group applies to the GPUs that the last group leaves;
        in a group the first variable with a value counts.
    """

    package: str
    start: str
    read: Callable[[Any], list[Gpu]]
    utilization: Callable[[Any, str], Any]
    memory_in_use: Callable[[Any, str, Collection[int]], int]
    energy: Callable[[Any, str], float]
    variables: tuple[tuple[str, ...], ...]
    links: Callable[[Any, str], int] | None = None


def gpus_of_node() -> tuple[Gpu, ...]:
    """Return the GPUs of this node that this process may open; none if no library is available."""
    return tuple(gpu for vendor in VENDORS for gpu in _gpus_of(vendor))


def visible_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that a process with these variables uses, in the order of its indices.

    Entries are indices, UUIDs, or unique prefixes of UUIDs. An entry that names no GPU hides itself and all
    later entries, as CUDA documents it. Indices are those of `gpus`: on a node with different NVIDIA GPUs
    this is right only with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. Of several MIG devices, which Slurm names, CUDA
    would use the first; ranks get one each (`Binding.visible`).
    """
    seen: list[Gpu] = []
    for vendor, library in VENDORS.items():
        left = [gpu for gpu in gpus if gpu.vendor == vendor]
        for names in library.variables:
            values = [environment[name] for name in names if name in environment]
            left = _named(values[0], left) if values else left
        seen += left
    return tuple(seen)


def utilization(gpu: Gpu) -> float | None:
    """Return the recent share of time (0 to 1) in which a GPU was busy; None if unknown."""
    library = _library(gpu.vendor)
    percent = library and _or_none(VENDORS[gpu.vendor].utilization, library, gpu.bus_address)
    return percent / 100 if isinstance(percent, int) else None


def active_links(gpu: Gpu) -> int | None:
    """Return the number of active NVLinks of a GPU; None if unknown."""
    library, read = _library(gpu.vendor), VENDORS[gpu.vendor].links
    return _or_none(read, library, gpu.bus_address) if library and read else None


def memory_in_use(gpu: Gpu, pids: Collection[int]) -> int | None:
    """Return the bytes that processes use on a GPU of their own; None if unknown."""
    library = _library(gpu.vendor)
    return library and _or_none(VENDORS[gpu.vendor].memory_in_use, library, gpu.bus_address, pids)


def energy(gpu: Gpu) -> float | None:
    """Return the joules that a GPU has used since its driver was loaded; None if unknown, or of a part."""
    library = _library(gpu.vendor)
    is_known = library and not gpu.whole
    return _or_none(VENDORS[gpu.vendor].energy, library, gpu.bus_address) if is_known else None


def _gpus_of(vendor: str) -> list[Gpu]:
    library = _library(vendor)
    found = (library and _or_none(VENDORS[vendor].read, library)) or []
    return [replace(gpu, index=index) for index, gpu in enumerate(found)]


@functools.cache
def _library(vendor: str) -> Any:
    """Import a vendor's package and start its library, once per process; None if unavailable."""
    try:
        # Without its library amdsmi prints, then raises a KeyError.
        with contextlib.redirect_stdout(io.StringIO()):
            package = importlib.import_module(VENDORS[vendor].package)
        getattr(package, VENDORS[vendor].start)()
    except Exception:
        return None
    return package


def _or_none(call: Callable[..., T], *arguments: Any) -> T | None:
    """Return the result of a library call; None on any error, since each library has errors of its own."""
    try:
        return call(*arguments)
    except Exception:
        return None


def _named(value: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    found = (_find(entry.strip(), gpus) for entry in value.split(","))
    return [gpu for gpu in takewhile(lambda gpu: gpu is not None, found) if gpu is not None]


def _find(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the only GPU that matches an entry; None if none or several do."""
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    # Before driver 470 a MIG device had the name ``MIG-<UUID of the GPU>/<GPU instance>/<compute instance>``.
    fitting = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    return fitting[0] if entry and len(fitting) == 1 else None


def _nvidia_gpus(nvml: Any) -> list[Gpu]:
    driver = nvml.nvmlSystemGetDriverVersion()
    # The count includes GPUs that this process may not open.
    found = (_or_none(_nvidia_devices, nvml, number, driver) for number in range(nvml.nvmlDeviceGetCount()))
    devices = [device for of_gpu in found for device in of_gpu or ()]
    return sorted(devices, key=lambda gpu: gpu.bus_address)


def _nvidia_devices(nvml: Any, number: int, driver: str) -> list[Gpu]:
    """Return a GPU, or in its place its MIG devices."""
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    pci = nvml.nvmlDeviceGetPciInfo(handle)
    # NVML writes the domain with eight digits, the kernel with four. GPUs are function 0.
    bus_address = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
    cores = _nvidia_cores(nvml, handle) or _local_cpus(bus_address)

    def device(one: Any) -> Gpu:
        memory = _or_none(nvml.nvmlDeviceGetMemoryInfo, one)
        uuid, name = nvml.nvmlDeviceGetUUID(one), nvml.nvmlDeviceGetName(one)
        return Gpu(0, "nvidia", uuid, bus_address, name, driver, memory and memory.total, cores)

    gpu = device(handle)
    return [replace(device(one), whole=gpu.uuid) for one in _mig_devices(nvml, handle)] or [gpu]


def _nvidia_cores(nvml: Any, handle: Any) -> tuple[int, ...]:
    words = -(-os.sysconf("SC_NPROCESSORS_CONF") // WORD_BITS)
    return _set_bits(_or_none(nvml.nvmlDeviceGetCpuAffinity, handle, words) or ())


def _mig_devices(nvml: Any, handle: Any) -> list[Any]:
    """Return the handles of a GPU's MIG devices; it may have fewer than the maximum."""
    most = _or_none(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    found = [_or_none(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index) for index in range(most)]
    return [device for device in found if device is not None]


def _nvidia_utilization(nvml: Any, bus_address: str) -> Any:
    return nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByPciBusId(bus_address)).gpu


def _nvidia_memory(nvml: Any, bus_address: str, pids: Collection[int]) -> int:
    """Return the processes' bytes, or the GPU's if a container gives processes other numbers."""
    handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_address)
    running = _or_none(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    own = sum(one.usedGpuMemory or 0 for one in running if one.pid in pids)
    return int(own or nvml.nvmlDeviceGetMemoryInfo(handle).used)


def _nvidia_energy(nvml: Any, bus_address: str) -> float:
    """Return joules of NVML's counter of millijoules; GPUs before Volta have none."""
    handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_address)
    return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3


def _nvidia_links(nvml: Any, bus_address: str) -> int:
    """Count the active links; queries of missing links fail."""
    handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_address)
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    states = [_or_none(nvml.nvmlDeviceGetNvLinkState, handle, link) for link in links]
    return states.count(nvml.NVML_FEATURE_ENABLED)


def _amd_gpus(smi: Any) -> list[Gpu]:
    gpus = [_or_none(_amd_gpu, smi, handle) for handle in smi.amdsmi_get_processor_handles()]
    return [gpu for _, gpu in sorted(filter(None, gpus), key=lambda one: (one[0], one[1].bus_address))]


def _amd_gpu(smi: Any, handle: Any) -> tuple[int, Gpu]:
    """Return HIP's index (0 if AMD SMI has none) and the GPU."""
    bus_address = smi.amdsmi_get_gpu_device_bdf(handle)
    # The package has no such function before ROCm 6.4.
    hip = _or_none(lambda: smi.amdsmi_get_gpu_enumeration_info(handle)) or {}
    index = hip.get("hip_id")
    gpu = Gpu(
        index=0,
        vendor="amd",
        uuid=hip.get("hip_uuid") or smi.amdsmi_get_gpu_device_uuid(handle),
        bus_address=bus_address,
        name=smi.amdsmi_get_gpu_asic_info(handle)["market_name"],
        driver=smi.amdsmi_get_gpu_driver_info(handle)["driver_version"],
        memory=_or_none(smi.amdsmi_get_gpu_memory_total, handle, smi.AmdSmiMemoryType.VRAM),
        # amdsmi_get_cpu_affinity_with_scope has no room for a core's second thread (amdsmi 7.0).
        cores=_local_cpus(bus_address),
    )
    return (index if isinstance(index, int) else 0), gpu


def _amd_utilization(smi: Any, bus_address: str) -> Any:
    handle = smi.amdsmi_get_processor_handle_from_bdf(bus_address)
    return smi.amdsmi_get_gpu_activity(handle)["gfx_activity"]


def _amd_memory(smi: Any, bus_address: str, _pids: Collection[int]) -> int:
    handle = smi.amdsmi_get_processor_handle_from_bdf(bus_address)
    return int(smi.amdsmi_get_gpu_memory_usage(handle, smi.AmdSmiMemoryType.VRAM))


def _amd_energy(smi: Any, bus_address: str) -> float:
    """Return joules of AMD SMI's counter, whose unit is its resolution in microjoules."""
    count = smi.amdsmi_get_energy_count(smi.amdsmi_get_processor_handle_from_bdf(bus_address))
    # Before ROCm 6.3 it was called ``power``.
    units = count.get("energy_accumulator", count.get("power"))
    return float(units) * float(count["counter_resolution"]) / 1e6


def _set_bits(words: Iterable[int]) -> tuple[int, ...]:
    """Return the positions of the set bits, in words of `WORD_BITS` bits."""
    bits = ((place * WORD_BITS, word, bit) for place, word in enumerate(words) for bit in range(WORD_BITS))
    return tuple(first + bit for first, word, bit in bits if word >> bit & 1)


def _local_cpus(bus_address: str) -> tuple[int, ...]:
    """Return the logical CPUs near a PCI device by the kernel's list; none without one."""
    try:
        return parse_cpu_list((PCI_DEVICES / bus_address / "local_cpulist").read_text(encoding="ascii"))
    except OSError:
        return ()


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the numbers in a list such as ``0-3,8,10-11``, the kernel's format in /sys."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


VENDORS: Mapping[str, Vendor] = {
    "nvidia": Vendor(
        "pynvml",
        "nvmlInit",
        _nvidia_gpus,
        _nvidia_utilization,
        _nvidia_memory,
        _nvidia_energy,
        (("CUDA_VISIBLE_DEVICES",),),
        _nvidia_links,
    ),
    "amd": Vendor(
        "amdsmi",
        "amdsmi_init",
        _amd_gpus,
        _amd_utilization,
        _amd_memory,
        _amd_energy,
        # ROCm's runtime applies first; HIP counts the GPUs that it leaves. HIP also reads CUDA's variable
        # (https://rocm.docs.amd.com/en/docs-7.1.1/reference/env-variables.html).
        (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    ),
}
