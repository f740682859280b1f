"""What tests of several packages share."""

from __future__ import annotations

import gc
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from lsf_cluster import FluxCluster, LsfCluster, PbsCluster
from slurm_cluster import SlurmCluster, missing_programs
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from hetctl.runtime.agent.binding import hide_gpus

# Until all tests are collected: with collections of garbage, imports of the frameworks take a fifth longer.
gc.disable()

# Jobs of tests do not wait for those of the person who runs them.
LOCKS = tempfile.TemporaryDirectory(prefix="hetctl-locks-", dir="/tmp")
os.environ["HETCTL_SLOT_LOCKS"] = LOCKS.name
# Sites of tests have more cores than this machine: OpenMP's threads, which wait by spinning, take those of
# others, and three quarters of the processor time of PyTorch's ranks.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# TensorFlow's own default depends on the processor, and without oneDNN it does not count its memory.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

VARIABLES = {"gpu": "HETCTL_TEST_GPUS", "weekly": "HETCTL_WEEKLY"}
LEFT_OUT = [mark for mark, variable in VARIABLES.items() if os.environ.get(variable) != "1"]
"""Marks of tests that are left out."""

# Tests have the same device on each machine, but for those of GPUs.
if "gpu" in LEFT_OUT:
    hide_gpus()

# A build server must not fail for a case that has nothing to do with the change, and is slow; people explore.
settings.register_profile("people", deadline=None)
settings.register_profile("server", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("server" if os.environ.get("CI") else "people")


LONGEST = ("test_slurm_faults", "test_slurm_training", "test_slurm_tutorial")
"""Files of half of the time on Slurm, of tests that train and of others alike."""


def _on_slurm(nodeid: str) -> bool:
    return "slurm" in nodeid.lower()


class Lanes(LoadFileScheduling):
    """Tests on Slurm, which mostly wait, go in two processes, each with a cluster; others go file by file."""

    def _split_scope(self, nodeid: str) -> str:
        if not _on_slurm(nodeid):
            return super()._split_scope(nodeid)
        return "slurm, longest" if any(name in nodeid for name in LONGEST) else "slurm"


MAY_HAVE_TESTS: dict[str, Callable[[str], bool]] = {
    "training": lambda text: "mark.training" in text,
    "not training": lambda text: not re.search(r"^pytestmark = (\[[^]]*|.*)training", text, re.MULTILINE),
}
"""Functions from ``-m`` to whether a file of this text may have such tests."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a test of the part that runs, whose imports take half of the collection."""
    may_have = MAY_HAVE_TESTS.get(config.option.markexpr)
    if may_have is None or not collection_path.name.startswith("test_"):
        return None
    return None if may_have(collection_path.read_text(encoding="utf-8")) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out some; where tests are spread, begin with those on Slurm, which take longest."""
    items[:] = [item for item in items if not any(map(item.get_closest_marker, LEFT_OUT))]
    if hasattr(config, "workerinput"):  # the processes collect; the one that spreads tests does not
        items.sort(key=lambda item: not _on_slurm(item.nodeid))


def pytest_collection_finish() -> None:
    """Collect garbage again, but not what was imported."""
    gc.freeze()
    gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Lanes | None:
    """Have tests spread so where it is by files."""
    return Lanes(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A real Slurm of 4 nodes with 2 GPUs each; without Slurm, skipped unless HETCTL_REQUIRE_SLURM=1."""
    missing = missing_programs()
    if missing:
        reason = f"no Slurm on this machine: {', '.join(missing)} missing; .ci/setup test installs it"
        if os.environ.get("HETCTL_REQUIRE_SLURM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="hetctl-slurm-", dir="/tmp"))
    cluster = SlurmCluster(folder)
    cluster.start()
    yield cluster
    cluster.stop()
    shutil.rmtree(folder)


@pytest.fixture
def start_lsf(monkeypatch):
    """Start clusters of the stand-in for LSF, whose commands are then on the PATH; stop them at the end."""
    yield from starting(LsfCluster, monkeypatch)


@pytest.fixture
def start_pbs(monkeypatch):
    """The same with the stand-in for PBS."""
    yield from starting(PbsCluster, monkeypatch)


@pytest.fixture
def start_flux(monkeypatch):
    """The same with the stand-in for Flux."""
    yield from starting(FluxCluster, monkeypatch)


def starting(kind, monkeypatch):
    started = []

    def start(**settings):
        folder = Path(tempfile.mkdtemp(prefix="hetctl-standin-", dir="/tmp"))
        started.append(kind(folder, **settings))
        started[-1].start()
        for name, value in started[-1].environment().items():
            monkeypatch.setenv(name, value)
        return started[-1]

    monkeypatch.delenv("TMPDIR", raising=False)
    yield start
    for cluster in started:
        cluster.stop()
        shutil.rmtree(cluster.folder)
