"""Values of all ranks on rank 0."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ranks import rank_info_in, run_ranks

from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.group import join_group

pytestmark = pytest.mark.training


def of_rank(rank):
    """Return a value whose length is another one on each rank."""
    return [{"a": np.arange(10.0 * rank), "b": (rank, None)}, "text" * rank]


def work(rank, folder):
    place, publish = rank_info_in(folder, rank, 2)
    group = join_group(place, load_framework("pytorch"), publish)
    # A framework is imported only in the processes of ranks.
    from hetctl.runtime.frameworks.torch_ranks import gather

    values = gather(of_rank(rank))
    if rank == 0:
        kinds = [[type(part).__name__ for part in value] for value in values]
        found = [value[0]["a"].tolist() for value in values], [value[0]["b"] for value in values]
        (folder / "found.json").write_text(json.dumps([kinds, *found]))
    group.barrier_and_close()


def test_values_of_unequal_length_are_gathered(tmp_path):
    run_ranks(work, 2, tmp_path, tmp_path)
    kinds, arrays, pairs = json.loads((tmp_path / "found.json").read_text())
    assert kinds == [["dict", "str"]] * 2
    assert arrays == [[], np.arange(10.0).tolist()]
    assert pairs == [[0, None], [1, None]]
