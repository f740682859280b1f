"""GPUs of a node by substitutes for pynvml and amdsmi, modules of the same form."""

# The substitutes have the names and parameters of the real packages.
# ruff: noqa: ARG002, N802, N803, N818

from __future__ import annotations

import ctypes
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.runtime.agent import gpus
from hetctl.runtime.agent.binding import VISIBLE_DEVICES
from hetctl.runtime.agent.gpus import (
    Gpu,
    active_links,
    energy,
    gpus_of_node,
    memory_in_use,
    parse_cpu_list,
    utilization,
    visible_gpus,
)
from hetctl.runtime.worker import hardware


class NVMLError(Exception):
    """Base class of all errors of pynvml."""


class AmdSmiLibraryException(Exception):
    """Error of amdsmi."""


class FakeNvml(ModuleType):
    """NVML on a node with some GPUs, each a dict of its answers; a missing key is an error."""

    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, *devices):
        super().__init__("pynvml")
        self.devices = devices
        self.started = 0

    def fact(self, device, name):
        if name not in device:
            raise NVMLError("Not Supported")
        return device[name]

    def nvmlInit(self):
        self.started += 1

    def nvmlSystemGetDriverVersion(self):
        return "580.65.06"

    def nvmlDeviceGetCount(self):
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index):
        if self.devices[index].get("denied"):
            raise NVMLError("Insufficient Permissions")
        return self.devices[index]

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId):
        bus = int(pciBusId.split(":")[1], 16)
        return next(device for device in self.devices if device["bus"] == bus)

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(domain=handle.get("domain", 0), bus=handle["bus"], device=0)

    def nvmlDeviceGetUUID(self, handle):
        return self.fact(handle, "uuid")

    def nvmlDeviceGetName(self, handle):
        return handle.get("name", "NVIDIA A100-SXM4-40GB")

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        return SimpleNamespace(total=self.fact(handle, "memory"), used=handle.get("used", 0))

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        processes = self.fact(handle, "processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes.items()]

    def nvmlDeviceGetCpuAffinity(self, handle, cpuSetSize):
        words = self.fact(handle, "affinity")
        return (ctypes.c_ulonglong * cpuSetSize)(*words[:cpuSetSize])

    def nvmlDeviceGetMaxMigDeviceCount(self, device):
        return 7 if "mig" in device else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):
        if index >= len(device["mig"]):
            raise NVMLError("Not Found")
        name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
        return {"uuid": device["mig"][index], "name": name, "memory": 5 * 2**30}

    def nvmlDeviceGetNvLinkState(self, device, link):
        states = self.fact(device, "links")
        if link >= len(states):
            raise NVMLError("Invalid Argument")
        return states[link]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self.fact(handle, "millijoules")

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self.fact(handle, "busy"), memory=0)


class FakeAmdSmi(ModuleType):
    """AMD SMI on a node with some GPUs."""

    AmdSmiMemoryType = SimpleNamespace(VRAM="VRAM")

    def __init__(self, *devices, enumerates=True):
        super().__init__("amdsmi")
        self.devices = devices
        if enumerates:
            self.amdsmi_get_gpu_enumeration_info = lambda handle: {
                "hip_id": handle["hip"],
                "hip_uuid": f"GPU-{handle['hip']:016x}",
            }

    def amdsmi_init(self):
        if not self.devices:
            raise AmdSmiLibraryException("AMDSMI_STATUS_DRIVER_NOT_LOADED")

    def amdsmi_get_processor_handles(self):
        return list(self.devices)

    def amdsmi_get_processor_handle_from_bdf(self, bdf):
        return next(device for device in self.devices if device["bdf"] == bdf)

    def amdsmi_get_gpu_device_bdf(self, processor_handle):
        return processor_handle["bdf"]

    def amdsmi_get_gpu_device_uuid(self, processor_handle):
        return "31ff74b5-0000-1000-80fb-4a1a2f1b6f4e"

    def amdsmi_get_gpu_asic_info(self, processor_handle):
        return {"market_name": "AMD Instinct MI250X", "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]"}

    def amdsmi_get_gpu_driver_info(self, processor_handle):
        return {"driver_name": "amdgpu", "driver_version": "6.10.5", "driver_date": "N/A"}

    def amdsmi_get_gpu_memory_total(self, processor_handle, mem_type):
        assert mem_type == "VRAM"
        return 64 * 2**30

    def amdsmi_get_gpu_memory_usage(self, processor_handle, mem_type):
        assert mem_type == "VRAM"
        return 700

    def amdsmi_get_energy_count(self, processor_handle):
        return processor_handle["energy"]

    def amdsmi_get_gpu_activity(self, processor_handle):
        return {"gfx_activity": processor_handle["busy"], "umc_activity": 0, "mm_activity": "N/A"}


@pytest.fixture
def node(monkeypatch, tmp_path):
    """Return a function that installs packages on this node, which has none, with PCI devices in a folder."""
    for variable in VISIBLE_DEVICES:
        monkeypatch.delenv(variable, raising=False)
    for package in ("pynvml", "amdsmi"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(gpus, "PCI_DEVICES", tmp_path)
    gpus._library.cache_clear()
    yield lambda package: monkeypatch.setitem(sys.modules, package.__name__, package)
    gpus._library.cache_clear()


def a100(bus, **facts):
    return {"bus": bus, "uuid": f"GPU-{bus:08x}-aaaa", "memory": 40 * 2**30, "affinity": [0, 0], **facts}


def local_cpus(folder, bus_address, text):
    (folder / bus_address).mkdir()
    (folder / bus_address / "local_cpulist").write_text(text)


@pytest.mark.usefixtures("node")
def test_a_node_without_packages_has_no_gpus():
    assert gpus_of_node() == ()


@pytest.mark.parametrize("package", [FakeNvml(), FakeAmdSmi()])
def test_a_node_with_a_package_alone_has_no_gpus(node, package):
    node(package)
    assert gpus_of_node() == ()


def test_the_facts_of_nvidia_gpus(node, monkeypatch, tmp_path):
    monkeypatch.setattr(gpus.os, "sysconf", lambda _name: 128)
    local_cpus(tmp_path, "0000:41:00.0", "0-2,64\n")
    node(FakeNvml(a100(0x81, affinity=[0b1010, 1 << 63]), a100(0x41)))
    first, second = gpus_of_node()
    assert first == Gpu(
        index=0,
        vendor="nvidia",
        uuid="GPU-00000041-aaaa",
        bus_address="0000:41:00.0",
        name="NVIDIA A100-SXM4-40GB",
        driver="580.65.06",
        memory=40 * 2**30,
        cores=(0, 1, 2, 64),
    )
    assert (second.index, second.bus_address, second.cores) == (1, "0000:81:00.0", (1, 3, 127))


def test_fields_that_nvml_does_not_support_are_empty(node):
    bare = {"bus": 1, "domain": 0x10, "uuid": "GPU-1"}
    node(FakeNvml({"bus": 0, "denied": True}, bare))
    (gpu,) = gpus_of_node()
    assert (gpu.index, gpu.bus_address, gpu.memory, gpu.cores) == (0, "0010:01:00.0", None, ())
    assert utilization(gpu) is None


def test_the_library_is_started_once_in_a_process(node):
    nvml = FakeNvml(a100(1, busy=50))
    node(nvml)
    assert [utilization(gpu) for _ in range(3) for gpu in gpus_of_node()] == [0.5] * 3
    assert nvml.started == 1


def test_the_facts_of_amd_gpus(node, tmp_path):
    local_cpus(tmp_path, "0000:c1:00.0", "48-49")
    # HIP numbers GPUs in another order than the bus.
    node(
        FakeAmdSmi(
            {"bdf": "0000:c1:00.0", "hip": 1, "busy": 7}, {"bdf": "0000:d1:00.0", "hip": 0, "busy": "N/A"}
        )
    )
    first, second = gpus_of_node()
    assert second == Gpu(
        index=1,
        vendor="amd",
        uuid="GPU-0000000000000001",
        bus_address="0000:c1:00.0",
        name="AMD Instinct MI250X",
        driver="6.10.5",
        memory=64 * 2**30,
        cores=(48, 49),
    )
    assert (first.index, first.cores) == (0, ())
    assert (utilization(second), utilization(first)) == (0.07, None)


def test_amd_gpus_are_in_bus_order_without_hip_indices(node):
    devices = [{"bdf": f"0000:{bus}:00.0"} for bus in ("d6", "c1", "c9")]
    node(FakeAmdSmi(*devices, enumerates=False))
    assert [gpu.bus_address[5:7] for gpu in gpus_of_node()] == ["c1", "c9", "d6"]
    assert {gpu.uuid for gpu in gpus_of_node()} == {"31ff74b5-0000-1000-80fb-4a1a2f1b6f4e"}


@pytest.mark.usefixtures("node")
def test_an_amdsmi_without_its_library_is_silent(monkeypatch, tmp_path, capsys):
    (tmp_path / "amdsmi.py").write_text("print('Unable to find libamd_smi.so')\n{}['libamd_smi.so']\n")
    monkeypatch.delitem(sys.modules, "amdsmi")
    monkeypatch.syspath_prepend(tmp_path)
    assert gpus_of_node() == ()
    assert capsys.readouterr().out == ""


NVIDIA = tuple(
    Gpu(i, "nvidia", uuid, f"0000:0{i}:00.0", "A100", "1", None, ())
    for i, uuid in enumerate(("GPU-aa11-0", "GPU-aa22-1", "GPU-bb33-2", "MIG-b7-0", "MIG-GPU-cc44/1/0"))
)
AMD = tuple(Gpu(i, "amd", f"GPU-{i:016x}", f"0000:c{i}:00.0", "MI250X", "6", None, ()) for i in range(4))


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("2,0", [2, 0]),
        ("", []),
        ("NoDevFiles", []),
        ("0,-1,2", [0]),
        ("0,7,2", [0]),
        (" 1 ,2", [1, 2]),
        ("GPU-bb33-2,GPU-aa11", [2, 0]),
        ("GPU-aa", []),  # the beginning of two
        ("MIG-b7-0", [3]),
        ("MIG-GPU-cc44/1/0,MIG-b7", [4, 3]),
        ("MIG-none", []),
    ],
)
def test_visible_nvidia_gpus_of_a_process(value, seen):
    found = visible_gpus(NVIDIA, {"CUDA_VISIBLE_DEVICES": value, "ROCR_VISIBLE_DEVICES": "0"})
    assert [gpu.index for gpu in found] == seen


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, [0, 1, 2, 3]),
        ({"ROCR_VISIBLE_DEVICES": "3,1"}, [3, 1]),
        ({"ROCR_VISIBLE_DEVICES": "2,GPU-0000000000000000"}, [2, 0]),
        ({"HIP_VISIBLE_DEVICES": "2"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, [2]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "1"}, []),
    ],
)
def test_visible_amd_gpus_of_a_process(environment, seen):
    assert [gpu.index for gpu in visible_gpus(AMD, environment)] == seen


def test_mig_devices_take_the_place_of_their_gpu(node):
    node(FakeNvml(a100(1), a100(2, mig=["MIG-1", "MIG-2"])))
    whole, *parts = gpus_of_node()
    assert (whole.name, whole.memory, whole.whole) == ("NVIDIA A100-SXM4-40GB", 40 * 2**30, "")
    assert [(one.index, one.uuid) for one in parts] == [(1, "MIG-1"), (2, "MIG-2")]
    assert {(one.name, one.memory, one.bus_address, one.whole) for one in parts} == {
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5 * 2**30, "0000:02:00.0", "GPU-00000002-aaaa")
    }


def test_the_energy_of_whole_gpus_is_in_joules(node):
    node(FakeNvml(a100(1, millijoules=2500), a100(2), a100(3, millijoules=9, mig=["MIG-1"])))
    assert [energy(gpu) for gpu in gpus_of_node()] == [2.5, None, None]


@pytest.mark.parametrize("key", ["energy_accumulator", "power"])
def test_the_energy_of_amd_gpus_has_a_resolution(node, key):
    count = {key: 1_000_000, "counter_resolution": 15.3, "timestamp": 1}
    node(FakeAmdSmi({"bdf": "0000:c1:00.0", "hip": 0, "energy": count}))
    assert [energy(gpu) for gpu in gpus_of_node()] == [pytest.approx(15.3)]


def test_links_that_are_in_use_are_counted_where_nvml_tells(node):
    node(FakeNvml(a100(1, links=[1, 0, 1]), a100(2)))
    assert [active_links(gpu) for gpu in gpus_of_node()] == [2, 0]


@pytest.mark.usefixtures("node")
def test_links_are_unknown_without_a_package():
    assert [active_links(gpu) for gpu in (NVIDIA[0], AMD[0])] == [None, None]


@pytest.mark.parametrize(
    ("package", "in_use"),
    [
        (FakeNvml(a100(1, processes={7: 500, 8: 100}, used=900), a100(2, used=900)), [600, 900]),
        (FakeAmdSmi({"bdf": "0000:c1:00.0", "hip": 0}), [700]),
    ],
)
def test_memory_is_that_of_the_processes_or_else_of_the_gpu(node, package, in_use):
    node(package)
    assert [memory_in_use(gpu, (7, 8, 9)) for gpu in gpus_of_node()] == in_use


@given(st.sets(st.integers(0, 500)))
def test_lists_of_cpus_are_read_as_the_kernel_writes_them(cpus):
    assert parse_cpu_list(",".join(map(str, sorted(cpus))) + "\n") == tuple(sorted(cpus))
    ranges = [f"{cpu}-{cpu + 2}" for cpu in sorted(cpus)]
    assert set(parse_cpu_list(",".join(ranges))) == {cpu + more for cpu in cpus for more in range(3)}


@given(st.lists(st.integers(0, 2**64 - 1), max_size=4))
def test_bits_are_counted_over_all_words(words):
    assert sum(1 << bit for bit in gpus._set_bits(words)) == sum(w << 64 * i for i, w in enumerate(words))


def test_a_measurement_names_the_gpu_of_its_process(node, monkeypatch):
    assert hardware.hardware_here(None, "torch").driver.startswith("Linux ")
    gpus._library.cache_clear()
    node(FakeNvml(a100(1), a100(2)))
    found = hardware.hardware_here(None, "torch")
    assert (found.gpu_type, found.driver) == ("NVIDIA A100-SXM4-40GB", "580.65.06")
    assert hardware.hardware_here("a100", "torch").gpu_type == "a100"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.hardware_here(None, "torch").driver.startswith("Linux ")


def test_live_metrics_have_the_use_of_its_process_gpu(node, monkeypatch):
    node(FakeNvml(a100(1, busy=10), a100(2, busy=90)))
    assert [hardware.busy_share(device)() for device in (0, 1, 2)] == [0.1, 0.9, None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert hardware.busy_share(0)() == 0.9


def test_the_real_package_has_the_names_of_its_substitute():
    real = pytest.importorskip("pynvml")
    functions = {name: fake for name, fake in vars(FakeNvml).items() if name.startswith("nvml")}
    assert len(functions) > 10
    for name, fake in functions.items():
        parameters = list(inspect.signature(inspect.unwrap(getattr(real, name))).parameters)
        assert parameters == list(inspect.signature(fake).parameters)[1:], name
    assert issubclass(real.NVMLError_LibraryNotFound, real.NVMLError)
    assert real.NVML_FEATURE_ENABLED == FakeNvml.NVML_FEATURE_ENABLED
    assert real.NVML_NVLINK_MAX_LINKS >= FakeNvml.NVML_NVLINK_MAX_LINKS


def test_the_real_package_finds_no_gpus_without_its_library(monkeypatch):
    real = pytest.importorskip("pynvml")
    gpus._library.cache_clear()
    monkeypatch.setattr(real, "nvmlLib", None)
    monkeypatch.setattr(real, "CDLL", missing_library)
    assert gpus._gpus_of("nvidia") == []
    gpus._library.cache_clear()


def missing_library(name):
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")
