"""Energy of a node's GPUs or slots by counters of substitutes."""

from __future__ import annotations

import math

import pytest

from hetctl.runtime.agent import energy as energy_module
from hetctl.runtime.agent.energy import Counter, EnergyMeter
from hetctl.runtime.agent.gpus import Gpu

GPUS = tuple(Gpu(i, "nvidia", f"GPU-{i}", f"0000:0{i}:00.0", "A100", "1", None, ()) for i in range(2))


def counted(values, range_j=math.inf):
    left = list(values)
    counter = Counter(lambda: left.pop(0), range_j)
    for _ in values:
        counter.update()
    return counter.used_j


@pytest.mark.parametrize(
    ("values", "range_j", "used"),
    [
        ([100.0, 150.0, 180.0], math.inf, 80.0),
        ([900.0, 950.0, 30.0, 40.0], 1000.0, 140.0),  # it began anew
        ([900.0, 5.0], math.inf, 5.0),  # the driver was loaded again
        ([None, 10.0, None, 15.0], 1000.0, 5.0),
        ([None], math.inf, 0.0),
    ],
)
def test_a_counter_counts_from_its_first_value(values, range_j, used):
    assert counted(values, range_j) == used


def zone(folder, name, kind, used_uj, range_uj=10**9):
    (folder / name).mkdir()
    for file, value in (("name", kind), ("energy_uj", used_uj), ("max_energy_range_uj", range_uj)):
        (folder / name / file).write_text(f"{value}\n")


@pytest.fixture
def powercap(tmp_path):
    zone(tmp_path, "intel-rapl:0", "package-0", 100_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 7)
    zone(tmp_path, "intel-rapl:0:1", "dram", 990_000_000)
    zone(tmp_path, "intel-rapl:1", "package-1", 5_000_000)
    zone(tmp_path, "intel-rapl:2", "psys", 9)
    return tmp_path


def test_slots_share_the_energy_of_processors_and_memory(powercap):
    meter = EnergyMeter((0, 2), (), 4, powercap)
    assert meter.used_j() == {0: 0.0, 2: 0.0}
    for name, used_uj in (("intel-rapl:0", 160), ("intel-rapl:0:1", 10), ("intel-rapl:1", 25)):
        (powercap / name / "energy_uj").write_text(f"{used_uj}000000")
    # 60 and 20 J of processors, and 20 J of memory, whose counter began anew.
    assert meter.used_j() == pytest.approx({0: 25.0, 2: 25.0})


def test_nothing_is_told_where_nothing_may_be_read(powercap, tmp_path):
    assert EnergyMeter((0, 1), (), 2, tmp_path / "none").used_j() == {}
    for file in powercap.glob("*/energy_uj"):
        file.unlink()
    assert EnergyMeter((0, 1), (), 2, powercap).used_j() == {}


def test_each_gpu_has_its_own_counter(powercap, monkeypatch):
    used = {0: 1000.0, 1: 5000.0}
    monkeypatch.setattr(energy_module, "energy", lambda gpu: used[gpu.index])
    meter = EnergyMeter((3, 7), GPUS, 8, powercap)
    used |= {0: 1250.0, 1: 5001.0}
    assert meter.used_j() == {3: 250.0, 7: 1.0}


@pytest.mark.parametrize("gpus", [GPUS, GPUS[:1]])
def test_the_node_counts_where_a_gpu_does_not(powercap, monkeypatch, gpus):
    monkeypatch.setattr(energy_module, "energy", lambda gpu: None if gpu.index else 1.0)
    meter = EnergyMeter((3, 7), gpus, 2, powercap)
    (powercap / "intel-rapl:0" / "energy_uj").write_text("180000000")
    assert meter.used_j() == pytest.approx({3: 40.0, 7: 40.0})
