"""The batch systems that the contract is tested with."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from batch_benches import BENCHES

MARKS = {"slurm": [pytest.mark.slurm]}


@pytest.fixture(scope="module")
def standin():
    """Return the cluster of a kind of stand-in, which all tests share."""
    started = {}

    def of(kind):
        if kind not in started:
            started[kind] = kind(Path(tempfile.mkdtemp(prefix="hetctl-standin-", dir="/tmp")))
            started[kind].start()
        return started[kind]

    yield of
    for cluster in started.values():
        cluster.stop()
        shutil.rmtree(cluster.folder)


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, [])) for name in BENCHES])
def bench(request, tmp_path):
    """A batch system; whatever a test leaves running there is cancelled."""
    bench = BENCHES[request.param](request, tmp_path)
    yield bench
    bench.close()
