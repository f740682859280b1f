"""The batch systems that the contract is tested with."""

from __future__ import annotations

import pytest
from batch_benches import BENCHES

MARKS = {"slurm": [pytest.mark.slurm]}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, [])) for name in BENCHES])
def bench(request, tmp_path):
    """A batch system; whatever a test leaves running there is cancelled."""
    bench = BENCHES[request.param](request, tmp_path)
    yield bench
    bench.close()
