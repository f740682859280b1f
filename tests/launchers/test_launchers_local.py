from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from hetctl.core.errors import InfeasibleError
from hetctl.core.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.core.site import Queue, Site
from hetctl.launchers import LAUNCHERS, Step

HERE = Site("local", "local", "local", 1, 2, 4, 4 * 2**30, (Queue("main"),), device="slot")
GPUS = Site("local", "local", "local", 1, 4, 8, 4 * 2**30, (Queue("main"),))


def step(site: Site, *gpus: int, command: tuple[str, ...] = ("python",)) -> Step:
    allocation = Allocation("m", len(gpus), DATA_PARALLEL, 1.0, (Placement("localhost", gpus),))
    return LAUNCHERS["local"](site, allocation, command)


def test_one_rank_needs_no_mpirun() -> None:
    found = step(HERE, 1)
    assert found.argv == ("python",)
    assert found.environment["HETCTL_CORES"] == "2,3"


def test_ranks_share_the_cores_of_their_slots() -> None:
    found = step(HERE, 0, 1)
    assert found.argv[:3] == ("mpirun", "-np", "2")
    assert found.environment["HETCTL_CORES"] == "0,1,2,3"


def test_gpus_are_named() -> None:
    found = step(GPUS, 1, 3)
    assert found.environment == {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "1,3"}


def test_a_second_node_is_refused() -> None:
    placement = (Placement("a", (0,)), Placement("b", (0,)))
    with pytest.raises(InfeasibleError, match="2 nodes"):
        LAUNCHERS["local"](HERE, Allocation("m", 2, DATA_PARALLEL, 1.0, placement), ("python",))


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no Open MPI on this machine")
def test_mpirun_starts_every_rank_and_says_nothing_itself() -> None:
    words = "{OMPI_COMM_WORLD_LOCAL_RANK} {HETCTL_CORES}"
    report = f"import os; os.write(1, '{words}\\n'.format(**os.environ).encode())"
    found = step(HERE, 0, 1, command=(sys.executable, "-c", report))
    done = subprocess.run(
        found.argv, env={**os.environ, **found.environment}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["0 0,1,2,3", "1 0,1,2,3"]
