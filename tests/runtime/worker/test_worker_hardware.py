"""Memory of a rank's GPU, by the frameworks that its process has loaded."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from hetctl.model.training_settings import FRAMEWORKS
from hetctl.runtime.worker.hardware import NodeLoad, peak_gpu_memory, peak_memory, reset_peak_memory


class OnGpu:
    """A framework with 2**50 bytes on its GPU, until the measurement begins anew."""

    peak = 2**50

    def gpu_memory(self) -> int:
        return 2**51

    def peak_gpu_memory(self) -> int:
        return self.peak

    def reset_peak_memory(self) -> None:
        self.peak = 0


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_loaded_framework_tells_its_peak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in FRAMEWORKS.values():
        monkeypatch.delitem(sys.modules, entry.module, raising=False)
    reset_peak_memory()
    assert peak_gpu_memory() == 0
    monkeypatch.setitem(sys.modules, FRAMEWORKS[name].module, SimpleNamespace(FRAMEWORK=OnGpu()))
    assert peak_gpu_memory() == peak_memory() == 2**50
    reset_peak_memory()
    assert peak_gpu_memory() == 0
    assert peak_memory() > 0


def test_the_load_is_of_the_last_steps_not_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = OnGpu()
    for entry in FRAMEWORKS.values():
        monkeypatch.delitem(sys.modules, entry.module, raising=False)
    monkeypatch.setitem(sys.modules, FRAMEWORKS["pytorch"].module, SimpleNamespace(FRAMEWORK=gpu))
    load = NodeLoad()
    assert load.sample()[1] == 0.5
    gpu.peak = 2**49
    assert load.sample()[1] == 0.25
    # A failure is still reported with the peak of the whole task.
    assert peak_gpu_memory() == 2**50
    reset_peak_memory()
    assert peak_gpu_memory() == 0


def test_no_framework_is_imported_to_be_asked() -> None:
    code = "from hetctl.runtime.worker import hardware as h; h.peak_memory(); import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "tensorflow", "keras"} & set(done.stdout.split())
